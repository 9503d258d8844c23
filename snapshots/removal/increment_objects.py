"""Which objects of a snapshot belong to its increments: those that its full snapshot does not need."""

from __future__ import annotations

from collections.abc import Callable

from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.keys import parse_key

# Where a chain's increments have objects.
COPY_FOLDERS = ("base", "schema", "lists")
CHAIN_FOLDERS = ("increments", "wal", *COPY_FOLDERS)


def of_increments(full: Commit) -> Callable[[str], bool]:
    """Tells by its key whether an object is of increments: a commit, a further segment, what another create stored."""
    needed = {one.key for one in full.named}
    folders, copies = (
        tuple(f"snapshots/{full.snapshot}/{part}/" for part in parts) for parts in (CHAIN_FOLDERS, COPY_FOLDERS)
    )

    def is_of_increments(key: str) -> bool:
        if not key.startswith(copies):
            return key.startswith(folders) and key not in needed
        parsed = parse_key(full.snapshot, key)
        return parsed is not None and parsed.owner != full.operation

    return is_of_increments
