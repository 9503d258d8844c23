"""Base copies of primaries that were read on standbys, as the commands show them."""

from __future__ import annotations

from cutline.snapshots.records.commit import Commit, FullSnapshot


def shared_base_lines(commit: Commit) -> list[str]:
    """Return a line for each primary whose base copy, or copies of changed tables, were read on a standby."""
    changes, lines = commit.definition_changes, list[str]()
    if isinstance(commit, FullSnapshot):
        lines = [
            f"base of {primary} read from {shared.standby}, at {commit.base[shared.standby]}: both copies begin with it"
            for primary, shared in commit.shared_bases.items()
        ]
    readers = changes.readers if changes else {}
    return lines + [f"copied tables of {primary} read from {reader}" for primary, reader in readers.items()]
