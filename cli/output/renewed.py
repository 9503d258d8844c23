"""The copies that begin again with an increment, as the commands show them."""

from __future__ import annotations

from typing import Any

from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.proven_chains import point_label


def renewed_document(commit: Commit) -> list[dict[str, Any]]:
    """Return the nodes whose copies begin again with the commit, with role and reason, as in JSON output."""
    return [
        {
            "node": node,
            "backup_of": renewal.identity.backup_of,
            "base": str(renewal.base),
            "reason": renewal.reason,
        }
        for node, renewal in ({} if isinstance(commit, FullSnapshot) else commit.renewed).items()
    ]


def renewed_lines(commit: Commit) -> list[str]:
    """Return a line for each of these nodes."""
    gap = f"with a gap since {point_label(commit.increment - 1)}"
    return [
        f"{'standby' if one['backup_of'] else 'primary'} {one['node']} was copied again, {gap}: {one['reason']}"
        for one in renewed_document(commit)
    ]
