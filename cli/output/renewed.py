"""The copies that begin with an increment, and the shards that leave with it, as the commands show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cutline.fleet.messages import NODES_NAMED_MAX, group_by_value, join_some, list_some
from cutline.fleet.record import to_builtins
from cutline.snapshots.records.chain import RenewalGap, gaps_of
from cutline.snapshots.records.commit import BackgroundCopy, Commit, FullSnapshot
from cutline.snapshots.records.proven_chains import lost_points_text, lost_text, point_label


def renewed_document(commit: Commit) -> list[dict[str, Any]]:
    """Return the nodes whose copies begin with the commit, with role and reason, as in JSON output."""
    return [
        {
            "node": node,
            "backup_of": renewal.identity.backup_of,
            "base": str(renewal.base),
            "reason": renewal.reason,
            "new": renewal.is_new,
            "lost": to_builtins(renewal.lost),
        }
        for node, renewal in ({} if isinstance(commit, FullSnapshot) else commit.renewed).items()
    ]


def copying_document(commit: Commit) -> list[dict[str, Any]]:
    """Return the standbys whose tables are being copied in the background, and how far it is, as in JSON output."""
    return [{"node": node, **copy_document(copying)} for node, copying in commit.copying.items()]


def copy_document(copying: BackgroundCopy) -> dict[str, Any]:
    """Return the copy of a standby as in JSON output."""
    return {
        "backup_of": copying.identity.backup_of,
        "base": str(copying.base),
        "reason": copying.reason,
        "begun_by": copying.operation,
        "tables": copying.copied,
        "tables_wanted": copying.wanted,
        "bytes": copying.copied_bytes,
        "bytes_wanted": copying.wanted_bytes,
    }


def retired_shards(commit: Commit) -> list[str]:
    """Return the shards that the chain has only up to the commit before."""
    return [] if isinstance(commit, FullSnapshot) else list(commit.retired)


def renamed_nodes(commit: Commit) -> dict[str, str]:
    """Return the ids in fleet.toml of the nodes that the chain knows by others."""
    return {} if isinstance(commit, FullSnapshot) else dict(commit.renamed)


def gap_texts(gaps: Iterable[RenewalGap]) -> list[str]:
    """Name each time that can't be restored, and why: one text per increment, in order."""
    by_increment: dict[int, list[RenewalGap]] = {}
    for gap in gaps:
        by_increment.setdefault(gap.increment, []).append(gap)
    return [_gap_text(increment, of) for increment, of in by_increment.items()]


def _gap_text(increment: int, gaps: Sequence[RenewalGap]) -> str:
    copied = [
        f"{'primary' if len(nodes) == 1 else 'primaries'} {list_some(nodes, NODES_NAMED_MAX)}"
        f" {'was' if len(nodes) == 1 else 'were'} copied again: {reason}"
        for reason, nodes in group_by_value({gap.node: gap.reason for gap in gaps}).items()
    ]
    between = f"no time between {point_label(increment - 1)} and {point_label(increment)} can be restored"
    return "; ".join([f"{between}: {join_some(copied, NODES_NAMED_MAX)}", *_lost_texts(gaps)])


def _lost_texts(gaps: Iterable[RenewalGap]) -> list[str]:
    """Name the restore points that may hold lost transactions, beside the reasons for which primaries were copied."""
    texts, known = list[str](), dict[tuple[int, int], list[str]]()
    for gap in gaps:
        if gap.lost_since is None:
            continue
        if gap.is_loss_known:
            known.setdefault((gap.lost_since, gap.increment - 1), []).append(gap.node)
        else:
            texts.append(lost_text(gap))
    return [*(lost_points_text(*points, nodes) for points, nodes in known.items()), *texts]


def _copied_text(one: dict[str, Any], last: str) -> str:
    """Say that the node was copied, and for a primary, since when nothing can be restored in between."""
    if one["backup_of"]:
        return f"standby {one['node']} was copied{'' if one['new'] else ' again'}"
    return f"primary {one['node']} was copied{'' if one['new'] else f' again, with a gap since {last}'}"


def renewed_lines(commit: Commit) -> list[str]:
    """Return a line for each of these nodes, and for each shard that leaves."""
    last, lost = point_label(commit.increment - 1), {gap.node: _lost_texts([gap]) for gap in gaps_of(commit)}
    return [
        *(
            "; ".join([f"{_copied_text(one, last)}: {one['reason']}", *lost.get(one["node"], ())])
            for one in renewed_document(commit)
        ),
        *(f"shard {shard} was retired: {last} is the last with its rows" for shard in retired_shards(commit)),
    ]
