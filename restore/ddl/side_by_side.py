"""Choose the entries after the rows that several sessions may run concurrently, and hand them out.

Two entries whose dependencies show that they lock the same table never run concurrently. Entries whose dependencies
don't name all the tables that they lock could deadlock, so they run one after another. These are foreign keys from or
to partitioned tables, which lock partitions; entries with a second statement, such as CLUSTER ON after an index; and
exclusion constraints, whose functions may read other tables while their own is locked.

Some of these entries are **early**: they may run while rows of other tables are still being loaded, as soon as their
own table has all its rows. They lock one table and call no functions of the snapshot, because a function may read other
tables, whose rows may be missing: the index would then contain wrong values.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

from cutline.restore.ddl.ddl import Ddl, DdlEntry
from cutline.snapshots.ddl.ddl_archive import (
    AFTER_ROWS,
    CONSTRAINT,
    FOREIGN_KEY,
    TABLE,
    ArchiveEntry,
    NumberedEntry,
    statements_of_entry,
    with_dependents,
)

INDEX = "INDEX"
# The duration of these entries is proportional to the number of rows; all others change only catalogs.
LONG = (INDEX, CONSTRAINT, FOREIGN_KEY)
# Entries with a table's rows of which none are missing; a foreign key needs those of two tables.
EARLY = (INDEX, CONSTRAINT)
PARTITION = "TABLE ATTACH"
MATERIALIZED_VIEW = "MATERIALIZED VIEW"
ROUTINES = ("FUNCTION", "PROCEDURE", "AGGREGATE")


class BuiltObject(NamedTuple):
    """An index or a constraint, as raw text; `table` is "" for an index."""

    schema: str
    table: str
    name: str


class NamedEntry(NumberedEntry, Protocol):
    """An entry in an archive, and its object."""

    @property
    def kind(self) -> str:
        """The type of its object."""

    @property
    def schema(self) -> str:
        """The schema of its object."""

    @property
    def name(self) -> str:
        """The name of its object."""


AnyEntry = TypeVar("AnyEntry", bound=NamedEntry)


def find_side_by_side(body: bytes, entries: Iterable[ArchiveEntry]) -> frozenset[int]:
    """Return the numbers of the long-running entries after the rows that may run concurrently.

    Such an entry locks only its own tables, all in one statement, and if it depends on entries after the rows, those
    are similar entries. `body` is the archive with the entries' statements.
    """
    entries = list(entries)
    after_rows = [entry for entry in entries if entry.section == AFTER_ROWS]
    tables = {entry.number: entry for entry in entries if entry.kind == TABLE}
    tree = {number for entry in entries if entry.kind == PARTITION for number in entry.dependencies}
    # A foreign key depends on its table, and on a key that depends on the referenced table.
    tree |= {entry.number for entry in entries if not tree.isdisjoint(entry.dependencies)}
    long = {
        entry.number
        for entry in after_rows
        if entry.kind in LONG
        and not (entry.kind == FOREIGN_KEY and not tree.isdisjoint(entry.dependencies))
        and _locks_its_own_tables_at_once(body, entry)
        # The entry's name must be unambiguous: the existence check splits it at a space into table and name.
        and sum(is_of_table(entry, tables[number]) for number in tables.keys() & entry.dependencies) <= 1
    }
    others = [entry.number for entry in after_rows if entry.number not in long]
    return frozenset(long - with_dependents(after_rows, others))


def find_early(ddl: Ddl) -> dict[int, int]:
    """Return the numbers of the early entries, each with the number of the table that it locks."""
    before = {entry.number: entry for entry in ddl.pre_data}
    tables = tables_in(ddl)
    chosen = {entry.number: entry for entry in ddl.post_data if entry.number in ddl.side_by_side}
    # To add a primary key, PostgreSQL 18 and newer also lock the tables that inherit from the table.
    parents = {needed for entry in ddl.pre_data if entry.kind == TABLE for needed in entry.dependencies}
    early: dict[int, int] = {}
    for number, entry in chosen.items():
        locked = locked_tables(entry, tables, chosen)
        is_alone = len(locked) == 1 and locked.isdisjoint(parents)
        if entry.kind in EARLY and is_alone and _is_of_rows(entry, before, chosen):
            (early[number],) = locked
    late = with_dependents(ddl.post_data, [entry.number for entry in ddl.post_data if entry.number not in early])
    return {number: table for number, table in early.items() if number not in late}


def _is_of_rows(entry: DdlEntry, before: Mapping[int, DdlEntry], chosen: Mapping[int, DdlEntry]) -> bool:
    """Whether the entry's object depends on its table's rows alone: it needs no routine, not even indirectly."""
    reached, waiting = {entry.number}, [entry]
    while waiting:
        for number in waiting.pop().dependencies:
            needed = before.get(number) or chosen.get(number)
            # A superuser may have created the missing entry beforehand.
            if needed is None or needed.kind in ROUTINES:
                return False
            if number not in reached:
                reached.add(number)
                waiting.append(needed)
    return True


def tables_in(ddl: Ddl) -> dict[int, DdlEntry]:
    """Return the tables and materialized views, by number."""
    return {entry.number: entry for entry in ddl.pre_data if entry.kind in (TABLE, MATERIALIZED_VIEW)}


def table_of(entry: NamedEntry, entries: Mapping[int, AnyEntry]) -> AnyEntry | None:
    """Find the table of a constraint among the entries that it depends on; return None for an index."""
    needed = (entries[number] for number in entry.dependencies if number in entries)
    return next((any_entry for any_entry in needed if any_entry.kind == TABLE and is_of_table(entry, any_entry)), None)


def object_of(entry: NamedEntry, entries: Mapping[int, AnyEntry]) -> BuiltObject:
    """Return the index or constraint that the entry creates.

    The name of a constraint's entry consists of the names of the table and the constraint.
    """
    table = table_of(entry, entries)
    if table is None:
        return BuiltObject(entry.schema, "", entry.name)
    return BuiltObject(entry.schema, table.name, entry.name.removeprefix(f"{table.name} "))


def locked_tables(
    entry: NamedEntry, tables: Mapping[int, NamedEntry], others: Mapping[int, NamedEntry]
) -> frozenset[int]:
    """Return the numbers of the tables that the entry locks.

    A foreign key also locks the referenced table. It depends on that table's key, which is among the `others`.
    """
    found = set(entry.dependencies)
    for number in entry.dependencies:
        found.update(others[number].dependencies if number in others else ())
    return frozenset(found & tables.keys())


def is_of_table(entry: NamedEntry, table: NamedEntry) -> bool:
    """Whether a constraint may belong to this table: its entry's name begins with the table's name and a space."""
    return table.schema == entry.schema and entry.kind != INDEX and entry.name.startswith(f"{table.name} ")


def _locks_its_own_tables_at_once(body: bytes, entry: ArchiveEntry) -> bool:
    # A semicolon or EXCLUDE within quotes only costs time: the entry does not run concurrently.
    statements = statements_of_entry(body, entry)
    return statements.count(";") == 1 and "EXCLUDE" not in statements


class EntryQueue:
    """A queue of entries for several sessions: each entry waits for the entries it needs and the tables it locks.

    Iterating takes ready entries, waiting if necessary; the caller must return each entry with `end`. `sizes` are the
    sizes of tables, keyed by schema and name (raw text): entries of the largest tables come first. If the entries are
    `held`, each also waits until it is released. `refused` are the entries that were refused. If the queue
    `is_stopped`, it hands out no more entries.
    """

    def __init__(
        self,
        entries: Sequence[DdlEntry],
        tables: Mapping[int, DdlEntry],
        sizes: Mapping[tuple[str, str], int],
        *,
        held: bool = False,
    ) -> None:
        by_number = {entry.number: entry for entry in entries}
        self.locks = {entry.number: locked_tables(entry, tables, by_number) for entry in entries}
        self.refused: list[DdlEntry] = []
        self.is_stopped = False
        self._tables, self._sizes = tables, sizes
        self._places = {entry.number: place for place, entry in enumerate(entries)}
        self._unfinished = set(by_number)
        self._held, self._waiting = by_number, list[DdlEntry]()
        self._running: dict[int, DdlEntry] = {}
        self._changed = threading.Condition()
        if not held:
            self.release(self._places)

    def __iter__(self) -> Iterator[DdlEntry]:
        while (entry := self._take()) is not None:
            yield entry

    def __len__(self) -> int:
        """The number of entries that have not ended."""
        return len(self._unfinished)

    def release(self, numbers: Iterable[int]) -> None:
        """Let these entries start, unless they were released before."""
        with self._changed:
            self._waiting += [self._held.pop(number) for number in numbers if number in self._held]
            self._order()

    def release_all(self, sizes: Mapping[tuple[str, str], int]) -> None:
        """Let all entries start, in the order of these sizes."""
        self._sizes = sizes
        self.release(self._places)

    def take_ready(self) -> DdlEntry | None:
        """Take an entry that may start now, if there is one."""
        with self._changed:
            place = None if self.is_stopped else self._find_ready()
            return None if place is None else self._start(place)

    def end(self, entry: DdlEntry, *, is_refused: bool) -> None:
        """Return an entry. If it was refused, it and the entries that need it are retried after all others."""
        with self._changed:
            del self._running[entry.number]
            self._unfinished.remove(entry.number)
            if is_refused:
                self.refused.append(entry)
            self._changed.notify_all()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """If the block fails, stop handing out entries."""
        try:
            yield
        except BaseException:
            with self._changed:
                self.is_stopped = True
                self._changed.notify_all()
            raise

    def _order(self) -> None:
        def size(entry: DdlEntry) -> int:
            named = (self._tables[number] for number in entry.dependencies if number in self._tables)
            return max((self._sizes.get((table.schema, table.name), 0) for table in named), default=0)

        # Entries of the same size keep their order in the archive.
        self._waiting.sort(key=lambda entry: (-size(entry), self._places[entry.number]))
        self._changed.notify_all()

    def _take(self) -> DdlEntry | None:
        with self._changed:
            while self._waiting and not self.is_stopped:
                if (place := self._find_ready()) is not None:
                    return self._start(place)
                self._changed.wait()
            return None

    def _start(self, place: int) -> DdlEntry:
        entry = self._waiting.pop(place)
        self._running[entry.number] = entry
        return entry

    def _find_ready(self) -> int | None:
        """Find the first entry that may start; compare only sets, because there may be thousands of entries."""
        locked = {table for number in self._running for table in self.locks[number]}
        # CREATE INDEX locks its table in a mode that allows other CREATE INDEX statements.
        others = (number for number, entry in self._running.items() if entry.kind != INDEX)
        locked_for_indexes = {table for number in others for table in self.locks[number]}
        for place, entry in enumerate(self._waiting):
            taken = locked_for_indexes if entry.kind == INDEX else locked
            if taken.isdisjoint(self.locks[entry.number]) and self._unfinished.isdisjoint(entry.dependencies):
                return place
        return None
