"""Which entries of an archive several sessions may run side by side.

No two run at once whose dependencies say that they lock the same table. Dependencies do not name the partitions that a
statement on a partitioned table locks, nor the locks of an entry's second statement, such as CLUSTER ON after an index,
nor the tables read by functions that an exclusion constraint calls while it locks its own. These could deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from cutline.restore.ddl.marks import BuiltObject
from cutline.snapshots.ddl.archive import AFTER_ROWS, FOREIGN_KEY, ArchiveEntry, statements_of_entry, with_dependents

# They take long, in proportion to the rows; all others change catalogs only.
LONG = ("INDEX", "CONSTRAINT", FOREIGN_KEY)
PARTITION = "TABLE ATTACH"


class NamedEntry(Protocol):
    """An entry of an archive."""

    @property
    def number(self) -> int:
        """What identifies it."""

    @property
    def kind(self) -> str:
        """The type of its object."""

    @property
    def schema(self) -> str:
        """The schema of its object."""

    @property
    def name(self) -> str:
        """The name of its object."""

    @property
    def dependencies(self) -> tuple[int, ...]:
        """The numbers of the entries that it needs."""


AnyEntry = TypeVar("AnyEntry", bound=NamedEntry)


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


def table_of(entry: NamedEntry, entries: Mapping[int, AnyEntry]) -> AnyEntry | None:
    """The table of a constraint, among the entries that it depends on; None for an index."""
    needed = (entries[number] for number in entry.dependencies if number in entries)
    return next((one for one in needed if one.kind == "TABLE" and is_of_table(entry, one)), None)


def object_of(entry: NamedEntry, entries: Mapping[int, AnyEntry]) -> BuiltObject:
    """The index or constraint that the entry creates. A constraint's entry is named by its table and itself."""
    table = table_of(entry, entries)
    if table is None:
        return BuiltObject(entry.schema, "", entry.name)
    return BuiltObject(entry.schema, table.name, entry.name.removeprefix(f"{table.name} "))


def locked_tables(
    entry: NamedEntry, tables: Mapping[int, NamedEntry], others: Mapping[int, NamedEntry]
) -> frozenset[int]:
    """The numbers of the tables that the entry locks.

    A foreign key depends on a key of the other table, which is among the `others`, and locks that table.
    """
    found = set(entry.dependencies)
    for number in entry.dependencies:
        found.update(others[number].dependencies if number in others else ())
    return frozenset(found & tables.keys())


def is_of_table(entry: NamedEntry, table: NamedEntry) -> bool:
    """Whether a constraint's entry may be one of this table, by its name: that of the table, a space, and its own."""
    return table.schema == entry.schema and entry.kind != "INDEX" and entry.name.startswith(f"{table.name} ")


def _locks_its_own_tables_at_once(body: bytes, entry: ArchiveEntry) -> bool:
    # A semicolon or the word within quotes costs time only: all entries are run, these one after another.
    statements = statements_of_entry(body, entry)
    return statements.count(";") == 1 and "EXCLUDE" not in statements
