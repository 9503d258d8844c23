"""Compare each backup copy of a shard with the primary copy, by group and partition."""

from __future__ import annotations

from collections.abc import Mapping

from cutline.check.copies import Copies
from cutline.check.hashing import Sums
from cutline.check.image_hashes import PartitionHashes
from cutline.check.report import Conflict, Findings, Skipped
from cutline.fleet.messages import list_some
from cutline.nodes.left_out import LeftOutKind
from cutline.snapshots.records.proven_chains import point_label

NAMED_MAX, TABLES_NAMED_MAX = 1000, 20
EMPTY = (0, 0, 0, 0)
EVENTS = 0


def compare_copies(copies: Copies, hashes: PartitionHashes, findings: Findings) -> None:
    """Compare the rows and row versions of every partition; add conflicts and skipped parts to the report."""
    report = findings.report
    entries, writers = _by_node(copies, hashes.rows), _by_node(copies, hashes.versions)
    for primary, backup in copies.pairs:
        if _is_skipped(primary, backup, findings):
            continue
        places = sorted(entries.get(primary, {}).keys() | entries.get(backup, {}).keys())
        report.compared.partitions += len(places)
        conflicts = [
            conflict
            for place in places
            for conflict in _compare_place(copies, (primary, backup), place, entries, writers)
        ]
        report.conflicts += conflicts[:NAMED_MAX]
        if len(conflicts) > NAMED_MAX:
            detail = f"{len(conflicts) - NAMED_MAX:,} more partitions with conflicts are not listed"
            report.conflicts.append(Conflict("partition", detail, node=primary, other_node=backup))
    for shard in sorted(set(copies.shard.values())):
        if not any(primary == shard for primary, _ in copies.pairs):
            kinds = (LeftOutKind.STANDBY_COPY, LeftOutKind.ABSENT_COPY)
            out = [
                f"; {out.name}: {out.why}" for out in copies.chain.left_out if out.node == shard and out.kind in kinds
            ]
            why = f"no backup copy to compare with{''.join(out)}"
            findings.skip(Skipped(f"rows of shard {shard}", why, is_one_copy=True))
    for shard, shared in copies.chain.bases_read_once.items():
        others = set(copies.same_shard(shard)) - {shard}
        if others == {shared.standby}:
            why = f"they were read once, on {shared.standby}, for the copies of {shard} and {shared.standby}"
            findings.skip(Skipped(f"base rows of shard {shard}", why, is_one_copy=True))
    for shard in sorted(set(copies.shard.values())):
        for standby, tables in _tables_read_once(copies, shard).items():
            why = f"both copies were read on {standby} when the tables were copied"
            what = f"base rows of {list_some(tables, TABLES_NAMED_MAX)} in shard {shard}"
            findings.skip(Skipped(what, why, is_one_copy=True))
    for node, absent in copies.chain.absent.items():
        why = f"{point_label(absent.since)} and later leave it out: {absent.reason}"
        findings.skip(Skipped(f"the copy of {node}", why, is_absent=True))


def _tables_read_once(copies: Copies, shard: str) -> dict[str, list[str]]:
    """Return the names of the tables whose copies come from one reading of the shard's only standby, by standby."""
    if not (read_once := copies.chain.tables_read_once(shard)):
        return {}
    others, now = set(copies.same_shard(shard)) - {shard}, copies.chain.numbers_at_cut(shard)
    names = {group.number: group.name for group in copies.chain.groups(shard)}
    found: dict[str, set[str]] = {}
    for number, standby in read_once.items():
        if number in now and others == {standby}:
            found.setdefault(standby, set()).add(names[now[number]])
    return {standby: sorted(tables) for standby, tables in found.items()}


def _compare_place(
    copies: Copies,
    pair: tuple[str, str],
    place: tuple[int, ...],
    entries: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]],
    writers: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]],
) -> list[Conflict]:
    primary, backup = pair
    ours, theirs = (entries.get(node, {}).get(place, EMPTY) for node in pair)
    if ours == theirs:
        left, right = (writers.get(node, {}).get(place, EMPTY) for node in pair)
        if left == right:
            return []
        kind, detail = "version", "the rows are identical, but were last written by different transactions"
    elif ours[0] != theirs[0]:
        kind, detail = "row-count", f"{ours[0]:,} rows on {primary}, {theirs[0]:,} on {backup}"
    else:
        kind, detail = "row-hash", f"one or more of the {ours[0]:,} rows in this partition differ"
    group, partition = place
    return [
        Conflict(
            kind,
            detail,
            node=primary,
            other_node=backup,
            group=copies.group_name(primary, group),
            partition=partition,
        )
    ]


def compare_streams(copies: Copies, sums: Sums, findings: Findings) -> None:
    """Compare the copies' WAL archives: the changes by group, and the transaction events."""
    streams = _by_node(copies, sums)
    for primary, backup in copies.pairs:
        if primary in findings.damaged or backup in findings.damaged:
            continue
        ours, theirs = streams.get(primary, {}), streams.get(backup, {})
        for place in sorted(ours.keys() | theirs.keys()):
            left, right = ours.get(place, EMPTY), theirs.get(place, EMPTY)
            if left == right:
                continue
            what = "transaction events" if place == (EVENTS,) else "changes"
            findings.conflict(
                Conflict(
                    "events" if place == (EVENTS,) else "changes",
                    f"{left[0]:,} {what} in the archive of {primary}, {right[0]:,} in the archive of {backup}"
                    + ("" if left[0] != right[0] else ", with different contents"),
                    node=primary,
                    other_node=backup,
                    group=copies.group_name(primary, place[0]),
                )
            )


def _is_skipped(primary: str, backup: str, findings: Findings) -> bool:
    broken = sorted({primary, backup} & findings.damaged)
    if broken:
        why = f"objects of {' and '.join(broken)} are damaged"
        findings.skip(Skipped(f"rows of {primary} against {backup}", why))
    return bool(broken)


def _by_node(copies: Copies, sums: Sums) -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    """Group the combined hashes by node, the first number of each key; map the rest of the key to the hash."""
    by_node: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for key, value in sums.as_dict().items():
        by_node.setdefault(copies.nodes[key[0]], {})[key[1:]] = value
    return by_node
