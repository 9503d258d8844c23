"""Base copies of primaries that were read on standbys, as the commands show them."""

from __future__ import annotations

from cutline.snapshots.records.commit import Commit, FullSnapshot


def shared_base_lines(commit: Commit) -> list[str]:
    """Return a line for each primary whose tables were read on a standby."""
    if not isinstance(commit, FullSnapshot):
        return []
    return [
        f"base of {primary} read from {shared.standby}, at {commit.base[shared.standby]}: both copies begin with it"
        for primary, shared in commit.shared_bases.items()
    ]
