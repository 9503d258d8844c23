"""Which entries of an archive pg_restore may run side by side.

pg_restore runs no two entries at once that it knows to lock the same table. It knows nothing of the partitions that a
statement on a partitioned table locks, nor of the second statement of an entry, such as CLUSTER ON after an index, nor
of the tables that functions read which an exclusion constraint calls while it locks its own. So these may deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable

from snapshots.ddl.archive import AFTER_ROWS, FOREIGN_KEY, ArchiveEntry, statements_of_entry, with_dependents

# They take long, in proportion to the rows; all others change catalogs only.
LONG = ("INDEX", "CONSTRAINT", FOREIGN_KEY)
PARTITION = "TABLE ATTACH"


def find_side_by_side(body: bytes, entries: Iterable[ArchiveEntry]) -> frozenset[int]:
    """The numbers of the long entries after the rows that lock their own tables only, at once, and need none but these.

    `body` is the archive with the entries' statements.
    """
    entries = list(entries)
    after_rows = [entry for entry in entries if entry.section == AFTER_ROWS]
    tables = {entry.number: entry for entry in entries if entry.kind == "TABLE"}
    tree = {number for entry in entries if entry.kind == PARTITION for number in entry.dependencies}
    # A foreign key depends on its table, and on a key that depends on the other one.
    tree |= {entry.number for entry in entries if not tree.isdisjoint(entry.dependencies)}
    long = {
        entry.number
        for entry in after_rows
        if entry.kind in LONG
        and not (entry.kind == FOREIGN_KEY and not tree.isdisjoint(entry.dependencies))
        and _locks_its_own_tables_at_once(body, entry)
        # Whether it exists is asked by its table's name and its own, which are joined by a space.
        and sum(is_of_table(entry, tables[number]) for number in tables.keys() & entry.dependencies) <= 1
    }
    others = [entry.number for entry in after_rows if entry.number not in long]
    return frozenset(long - with_dependents(after_rows, others))


def is_of_table(entry: ArchiveEntry, table: ArchiveEntry) -> bool:
    """Whether a constraint's entry may be one of this table, by its name: that of the table, a space, and its own."""
    return table.schema == entry.schema and entry.kind != "INDEX" and entry.name.startswith(f"{table.name} ")


def _locks_its_own_tables_at_once(body: bytes, entry: ArchiveEntry) -> bool:
    # A semicolon or the word within quotes costs time only: all entries are run, these one after another.
    statements = statements_of_entry(body, entry)
    return statements.count(";") == 1 and "EXCLUDE" not in statements
