"""Which entries of an archive pg_restore may run side by side.

pg_restore runs no two statements at once that it knows to lock the same table. It knows nothing of the partitions that
a statement on a partitioned table locks, so two such statements may deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshots.ddl.archive import AFTER_ROWS, ArchiveEntry, with_dependents

# They take long, in proportion to the rows; all others change catalogs only.
LONG = ("INDEX", "CONSTRAINT", "FK CONSTRAINT")
PARTITION, FOREIGN_KEY = "TABLE ATTACH", "FK CONSTRAINT"


def find_side_by_side(entries: Iterable[ArchiveEntry]) -> set[int]:
    """The numbers of the entries after the rows that lock no partition besides their table, and need none but these."""
    by_number = {entry.number: entry for entry in entries}
    after_rows = [entry for entry in by_number.values() if entry.section == AFTER_ROWS]
    tree = {number for entry in by_number.values() if entry.kind == PARTITION for number in entry.dependencies}
    long = {
        entry.number
        for entry in after_rows
        if entry.kind in LONG and not (entry.kind == FOREIGN_KEY and _needs(entry, by_number) & tree)
    }
    others = [entry.number for entry in after_rows if entry.number not in long]
    return long - with_dependents(after_rows, others)


def _needs(entry: ArchiveEntry, by_number: dict[int, ArchiveEntry]) -> set[int]:
    """What a foreign key depends on: its table and a key, and what that depends on, the other table."""
    direct = set(entry.dependencies)
    return direct.union(*(by_number[number].dependencies for number in direct if number in by_number))
