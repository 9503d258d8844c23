"""Rebuild base objects of a node's copy from the base copy of another node of the shard.

The copies divide a table's rows into objects differently, so the rows of a damaged object are those that the other copy
has and no intact object of the node's copy has. Both copies are compared row by row on the way: if they disagree about
any row that both should have, or if the number of rows is not the one in the commit, neither is known to be right, and
nothing is rebuilt.

The copies were taken at different positions. Let the *window* be the WAL between them, which the archive of the copy
with the lower position contains.

- If the other copy is older, the changes of the window are applied to its rows.
- If it is newer, its rows already reflect the window, whose changes the archive of the repaired copy contains too. For
  a table with a key that makes no difference: a fold takes the last image of each key that changed. Only an update that
  changed a key and left out values needs the row under its old key. In tables without a key the window is undone.

In a merge, rows of a table may be stored under several definitions, and under others in each copy. They are compared in
the schema at its cut, and the new objects have that.

Rows of a table without a key can't be told apart, so all of its objects are replaced; so are those of other tables if
too many rows are lost. Objects with rows of several tables are then replaced together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, xxhash64
from cutline.columns.python_workers import local_frame, map_batches
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import list_some
from cutline.nodes.groups import Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, OBJECT_BYTES
from cutline.snapshots.base_copy.copy_slots import find_changed_groups
from cutline.snapshots.base_copy.row_writer import RowWriter
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows, overlays, read_bases
from cutline.snapshots.fold.changes import find_last
from cutline.snapshots.fold.schema_at_cut import SchemaMapping, mapping_to_cut
from cutline.snapshots.fold.sources import (
    PROBLEM,
    BaseSource,
    BaseSources,
    Source,
    converted_to_cut,
    read_tables,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import BASE, Commit, LostList, StoredObject, dead_digest, listed_objects
from cutline.snapshots.records.documents import base_prefix
from cutline.snapshots.records.repair_records import INTACT, ReplacedObject, Replacement
from cutline.snapshots.repair.rebuilt_segments import NotRebuildableError, source_of
from cutline.snapshots.repair.work import Work
from cutline.spark.sent_values import broadcast
from cutline.storage.errors import ErrorReport, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import (
    CHANGES,
    COMMIT_PREPARED,
    DELETE,
    INSERT,
    PARTIAL,
    PREPARE,
    SEGMENT_SCHEMA,
    TRUNCATE,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# If more rows are lost, all objects of their tables are replaced: a worker holds the hashes of the lost rows.
LOST_ROWS_MAX = 8_000_000
# The driver holds the changes of the window.
WINDOW_CHANGES_MAX, WINDOW_BYTES_MAX = 500_000, 256 << 20
# How often each row occurs here (in the intact objects of the repaired copy) and there (in the other copy at the
# repaired copy's position), by two hashes of its key; in a table without a key, of its line. `undone` counts lines
# there that the repaired copy does not have. `in_window` is positive for keys and lines that changed in the window.
COMPARED_SCHEMA = pa.schema(
    [
        ("group", pa.int32()), ("h1", pa.int64()), ("h2", pa.int64()), ("here", pa.int64()), ("there", pa.int64()),
        ("undone", pa.int64()), ("in_window", pa.int64()), ("here_entry", pa.int64()), ("there_entry", pa.int64()),
        ("problem", pa.string()),
    ]
)  # fmt: skip
COMPARED_ROWS = (
    "`group` int, h1 bigint, h2 bigint, here bigint, there bigint, undone bigint, in_window bigint, here_entry bigint,"
    " there_entry bigint, problem string"
)
IDENTITY, COUNTS = ["group", "h1", "h2"], ["here", "there", "undone", "in_window"]
ENTRIES = ["here_entry", "there_entry"]
# What the comparison finds. A SUMMARY counts the rows of a group: `lost` for certain, `unsure` because they changed in
# the window, and `doubtful` because the copies disagree. A KEY is lost. A LINE that changed in the window occurs `lost`
# times. A PROBLEM is the report on an object that can't be read.
FOUND_SCHEMA = pa.schema(
    [
        ("kind", pa.int8()), ("group", pa.int32()), ("h1", pa.int64()), ("lost", pa.int64()), ("unsure", pa.int64()),
        ("doubtful", pa.int64()), ("problem", pa.string()),
    ]
)  # fmt: skip
FOUND_ROWS = "kind tinyint, `group` int, h1 bigint, lost bigint, unsure bigint, doubtful bigint, problem string"
SUMMARY, KEY, LINE, UNREAD = range(4)
TABLES_NAMED_MAX = 5


class LocatedObject(Struct, frozen=True):
    """A base object, or a lost object list; `list` is the key of the object list that lists it, or ""."""

    stored: StoredObject | LostList
    list: str = ""

    def replaced(self, damage: str) -> ReplacedObject:
        """Return the entry of the object in a repair."""
        return ReplacedObject(self.stored.key, self.stored.digest, damage, self.list, dead_digest(self.stored))

    @property
    def groups(self) -> frozenset[int]:
        """The numbers of the groups with rows in the object."""
        return frozenset(number for number, rows in self.stored.rows.items() if rows)


def list_bases(commit: Commit, node: str) -> list[LocatedObject]:
    """Return the base objects that the commit lists for the node; its object lists must have been read."""
    found: list[LocatedObject] = []
    for entry in commit.entries:
        if (entry.kind, entry.node) != (BASE, node):
            continue
        if isinstance(entry, StoredObject | LostList):
            found.append(LocatedObject(entry))
        else:
            found += [LocatedObject(stored, entry.key) for stored in listed_objects(entry)]
    return found


class BaseUnit(Struct, frozen=True):
    """Damaged base objects of `node` in the commit of `increment` that are rebuilt together from the copy of `copy`.

    `damaged` maps their keys to the kinds of damage.
    """

    node: str
    copy: str
    increment: int
    damaged: Mapping[str, str]


def rebuild_base(chain: Chain, unit: BaseUnit, operation: str, work: Work) -> Replacement:
    """Store new base objects under keys of `operation` that contain the rows of the damaged ones.

    Raises NotRebuildableError, and any error of the store or of the tasks except ObjectDamagedError.
    """
    commit = next(one for one in chain.commits if one.increment == unit.increment)
    try:
        scope = _Scope.of(chain, commit, unit)
        _refuse_spanned(commit, scope, work.location.open())
        window = _Window.of(chain, unit, scope, work)
        wanted = _judge(_compare(scope, window, work), scope, window)
        objects = _write(chain.name, operation, scope, window, wanted, work)
    except ObjectDamagedError as error:
        # An error that a task reported has no other attributes.
        if error.details["node"] == unit.node:
            raise NotRebuildableError(
                f"another object of {unit.node} has to be repaired first: {error.message}"
            ) from error
        raise NotRebuildableError(f"neither copy can be trusted: {error.message}") from error
    _check_written(objects, scope, window.rules, wanted)
    damage = {**dict.fromkeys((one.stored.key for one in scope.here), INTACT), **unit.damaged}
    gone = [*scope.lost, *(scope.here if scope.rules.is_whole else ())]
    return Replacement(
        increment=commit.increment,
        commit=commit.digest,
        node=unit.node,
        copy=unit.copy,
        replaced=tuple(one.replaced(damage[one.stored.key]) for one in gone),
        objects=objects,
    )


class _Rules(Struct, frozen=True):
    """How rows are compared: the stored numbers of the `groups`, and of those without a key (`multisets`).

    If `is_whole`, all objects with rows of the groups are replaced. Rows of groups in `truncated` can't be compared.
    """

    groups: frozenset[int]
    multisets: frozenset[int]
    is_whole: bool
    truncated: frozenset[int] = frozenset()

    def are_lines(self, group: Any) -> Flags:
        """Flag the rows of groups without a key."""
        return np.isin(group, list(self.multisets))


class _CopyPositions(Struct, frozen=True):
    """The positions of a group's base copies. `is_recopied` is set if the table was copied again."""

    here_at: Lsn
    there_at: Lsn
    is_recopied: bool


class _Scope(Struct, frozen=True):
    """A unit's objects: those that are `lost`, the intact ones `here` with rows of the same groups, and all `there`.

    `mapping` converts the rows of a merged base to the schema at its cut, to which `rules` refer.
    """

    unit: BaseUnit
    lost: tuple[LocatedObject, ...]
    here: tuple[LocatedObject, ...]
    there: tuple[StoredObject, ...]
    rules: _Rules
    place: _CopyPositions
    definitions: Mapping[int, Group]
    mapping: SchemaMapping | None = None

    @classmethod
    def of(cls, chain: Chain, commit: Commit, unit: BaseUnit) -> _Scope:
        own, mapping = list_bases(commit, unit.node), mapping_of(chain, commit, unit.node)
        lost = [one for one in own if one.stored.key in unit.damaged]
        groups = frozenset[int]().union(*(at_cut(one.groups, mapping) for one in lost))
        definitions = chain.definitions(unit.node)
        rows = sum(sum(one.stored.rows.values()) for one in lost)
        is_whole = rows > LOST_ROWS_MAX or any(definitions[number].is_multiset for number in groups)
        if is_whole:
            groups = _together(own, groups, mapping)
        here = [one for one in own if one not in lost and at_cut(one.groups, mapping) & groups]
        if damaged := [one.stored.key for one in here if isinstance(one.stored, LostList)]:
            raise NotRebuildableError(f"object list {damaged[0]} of {unit.node} has to be repaired first")
        there = [one.stored for one in list_bases(commit, unit.copy) if at_cut(one.groups, mapping) & groups]
        if lists := [stored.key for stored in there if isinstance(stored, LostList)]:
            raise NotRebuildableError(f"neither copy can be trusted: object list {lists[0]} of {unit.copy} is damaged")
        places = {_place(chain, commit, unit, number) for number in groups}
        if len(places) > 1:
            raise NotRebuildableError("the tables in the objects were copied at different positions")
        place = places.pop() if places else _CopyPositions(Lsn(0), Lsn(0), is_recopied=False)
        multisets = frozenset(number for number in groups if definitions[number].is_multiset)
        rules = _Rules(groups, multisets, is_whole)
        objects = tuple(stored for stored in there if isinstance(stored, StoredObject))
        scope = cls(unit, tuple(lost), tuple(here), objects, rules, place, definitions, mapping)
        if mapping is not None and place.here_at != place.there_at:
            converted = {one.number for one in mapping.conversions.values()} & groups
            if converted:
                names = scope.names(converted)
                raise NotRebuildableError(
                    f"the definition of {names} has changed, and the copies were taken at different positions"
                )
        return scope

    @property
    def is_there_newer(self) -> bool:
        """Whether the other copy was taken at a later position."""
        return self.place.there_at > self.place.here_at

    def expected(self, objects: Iterable[LocatedObject]) -> Counter[int]:
        """Return the number of rows of each group in the objects, according to the commit."""
        rows: Counter[int] = Counter()
        for one in objects:
            for stored, count in one.stored.rows.items():
                rows.update(dict.fromkeys(at_cut((stored,), self.mapping) & self.rules.groups, count))
        return rows

    def names(self, numbers: Iterable[int]) -> str:
        """Return the names of these groups."""
        return list_some(sorted({self.definitions[number].name for number in numbers}), TABLES_NAMED_MAX)

    def sources(self) -> BaseSources:
        """Return the sources to compare: number 0 for the intact objects here, 1 for the objects there."""
        here = [self._source(one.stored, 0) for one in self.here if isinstance(one.stored, StoredObject)]
        return BaseSources.of([*here, *self.sources_there()])

    def sources_there(self) -> list[BaseSource]:
        """Return the sources of the rows."""
        return [self._source(stored, 1) for stored in self.there]

    def _source(self, stored: StoredObject, number: int) -> BaseSource:
        source = Source(stored.key, stored.node, number, stored.size, stored.digest, stored.rows, dead=stored.dead)
        mapping = self.mapping.restrict_to(stored.rows) if self.mapping else None
        return BaseSource(source, stored.rows, multisets=self.rules.multisets, mapping=mapping)


def mapping_of(chain: Chain, commit: Commit, node: str) -> SchemaMapping | None:
    """Map the rows of a merged base to the schema at its cut; None for those that a create has copied.

    A merge carries objects, so rows of one table may be stored under several definitions, and under others in each
    copy; rows of tables that are gone may be among them.
    """
    if chain.beginning is None or commit is not chain.full:
        return None
    return mapping_to_cut(chain.up_to(commit.increment), node)


def at_cut(groups: Iterable[int], mapping: SchemaMapping | None) -> frozenset[int]:
    """Return the numbers of the groups in the schema of the comparison, without those that are gone."""
    if mapping is None:
        return frozenset(groups)
    return frozenset(now for number in groups if (now := mapping.number_of(number)) is not None)


def _together(own: Iterable[LocatedObject], groups: frozenset[int], mapping: SchemaMapping | None) -> frozenset[int]:
    """Return the groups with which these share objects, directly or through others."""
    waiting = [at_cut(one.groups, mapping) for one in own]
    while more := [one for one in waiting if one & groups]:
        waiting = [one for one in waiting if not one & groups]
        groups = groups.union(*more)
    return groups


def _place(chain: Chain, commit: Commit, unit: BaseUnit, number: int) -> _CopyPositions:
    begun = commit.definition_changes.begun if commit.definition_changes else {}
    if number in begun.get(unit.node, {}):
        if number not in begun.get(unit.copy, {}):
            raise NotRebuildableError(f"the increment did not copy the table from {unit.copy}")
        return _CopyPositions(begun[unit.node][number], begun[unit.copy][number], is_recopied=True)
    if stepwise := [node for node in (unit.node, unit.copy) if chain.complete_at[node] != chain.bases[node]]:
        raise NotRebuildableError(f"tables of {stepwise[0]} were copied at different positions, between increments")
    here, there = (chain.bases[chain.base_read_on(node)] for node in (unit.node, unit.copy))
    return _CopyPositions(here, there, is_recopied=False)


def _refuse_spanned(commit: Commit, scope: _Scope, store: ObjectStore) -> None:
    """Raise NotRebuildableError if transactions that changed the tables were prepared before a copy and decided later.

    The window of changes between both copies would not be right: it is delimited by the positions of PREPAREs.
    """
    changes = commit.definition_changes
    if changes is None or not scope.place.is_recopied or scope.place.here_at == scope.place.there_at:
        return
    for node in (scope.unit.node, scope.unit.copy):
        # The commit lists them for all tables that it copied.
        listed = changes.pending.get(node, ())
        changed = find_changed_groups(store, commit.segments[node], listed, scope.rules.groups)
        if changed:
            names = scope.names(frozenset[int]().union(*changed.values()))
            raise NotRebuildableError(
                f"tables copied again on {node} while transactions that had changed them were prepared: {names}"
            )


class _Window(Struct, frozen=True):
    """The changes of the scope's groups between the positions of both copies.

    `changed` are the keys whose rows there are not those of the repaired copy's position, and `images` the rows
    (BASE_SCHEMA) that replace them; both are empty if the other copy is newer. `in_window` (COMPARED_SCHEMA) marks keys
    and lines that changed, and adds images and lines. `lines` are the changed lines of tables without a key
    (BASE_SCHEMA), each once. `rules` are those of the scope, with the groups that were truncated.
    """

    rules: _Rules
    changed: Mapping[int, Keys] = field(default_factory=dict)
    images: pa.Table = field(default_factory=BASE_SCHEMA.empty_table)
    in_window: pa.Table = field(default_factory=COMPARED_SCHEMA.empty_table)
    lines: pa.Table = field(default_factory=BASE_SCHEMA.empty_table)

    @classmethod
    def of(cls, chain: Chain, unit: BaseUnit, scope: _Scope, work: Work) -> _Window:
        if scope.place.here_at == scope.place.there_at or not scope.rules.groups:
            return cls(scope.rules)
        older = unit.node if scope.is_there_newer else unit.copy
        if not scope.place.is_recopied:
            # The archive of the node on which the rows were read begins at their position.
            older = chain.base_read_on(older)
        low, high = sorted((scope.place.here_at, scope.place.there_at))
        if older in chain.absent and chain.absent[older].last.through < high:
            # A merge carries the copy of a standby that is away: the changes since are not in its archive yet.
            raise NotRebuildableError(f"{older} is away, and its archive ends before the position of the other copy")
        changes = _read_window(chain, older, low, high, scope, work)
        return _new_window(changes, scope) if len(changes) else cls(scope.rules)


def _read_window(chain: Chain, node: str, low: Lsn, high: Lsn, scope: _Scope, work: Work) -> pa.Table:
    """Read the changes of the scope's groups that the copy at `high` reflects, and the copy at `low` does not."""
    store, tables = work.location.open(), [SEGMENT_SCHEMA.empty_table()]
    events: list[pa.Table] = [SEGMENT_SCHEMA.empty_table()]
    for segment in chain.segments(node):
        if segment.through <= low or segment.after >= high:
            continue
        for table in read_tables(store, source_of(segment), SEGMENT_SCHEMA):
            op, lsn = to_numpy(table["op"]), to_numpy(table["lsn"])
            is_change = np.isin(op, CHANGES)
            events.append(table.filter(to_mask(~is_change)))
            chosen = is_change & (lsn < high) & np.isin(to_numpy(table["group"]), list(scope.rules.groups))
            # Of a table that was copied again, the archive also contains the changes before its copy.
            chosen &= (lsn >= low) if scope.place.is_recopied else True
            tables.append(table.filter(to_mask(chosen)))
        if sum(map(len, tables)) > WINDOW_CHANGES_MAX or sum(table.nbytes for table in tables) > WINDOW_BYTES_MAX:
            raise NotRebuildableError(f"too many changes were made between the copies, from {low} to {high}")
    found, undecided = pa.concat_tables(tables), _undecided_at(pa.concat_tables(events), high)
    return found.filter(to_mask(~np.isin(to_numpy(found["lsn"]), undecided)))


def _undecided_at(events: pa.Table, position: Lsn) -> Ints:
    """Return the positions of prepared transactions that were not committed at `position`."""
    op, xid = to_numpy(events["op"]), to_numpy(events["xid"])
    committed = xid[(op == COMMIT_PREPARED) & (to_numpy(events["end_lsn"]) <= position)]
    return np.asarray(to_numpy(events["lsn"])[(op == PREPARE) & ~np.isin(xid, committed)])


def _new_window(changes: pa.Table, scope: _Scope) -> _Window:
    op, group = to_numpy(changes["op"]), to_numpy(changes["group"])
    is_line = scope.rules.are_lines(group)
    rules = replace(scope.rules, truncated=frozenset(np.unique(group[op == TRUNCATE]).tolist()))
    if rules.truncated and (rules.truncated & rules.multisets or not scope.is_there_newer):
        raise NotRebuildableError(f"table {scope.names(rules.truncated)} was truncated between the copies")
    keyed, lines = changes.filter(to_mask(~is_line & (op != TRUNCATE))), changes.filter(to_mask(is_line))
    last, of_lines = _last_changes(keyed), _count_lines(lines, scope)
    if scope.is_there_newer:
        moved = keyed.filter(to_mask((to_numpy(keyed["op"]) == DELETE) & (_lengths(keyed["row"]) > 0)))
        _refuse(moved, scope, "keys were changed in rows with large values")
        in_window = pa.concat_tables([of_lines, _compared(last, rules, in_window=1)])
        return _Window(rules, in_window=in_window, lines=_distinct(lines))
    _refuse(last.filter(to_mask(to_numpy(last["op"]) == PARTIAL)), scope, "rows with large values were updated")
    images = last.filter(to_mask(to_numpy(last["op"]) != DELETE)).select(BASE_SCHEMA.names).cast(BASE_SCHEMA)
    keys = last.select(["group", "key"]).add_column(0, "node", to_arrow(np.zeros(len(last), np.int32)))
    changed: dict[int, Keys] = dict(overlays(keys).get(0, {}))
    in_window = pa.concat_tables([of_lines, _compared(images, rules, there=1)])
    return _Window(rules, changed, images, in_window, _distinct(lines))


def _refuse(changes: pa.Table, scope: _Scope, what: str) -> None:
    """Raise NotRebuildableError if there are such changes."""
    if len(changes):
        names = scope.names(np.unique(to_numpy(changes["group"])).tolist())
        raise NotRebuildableError(f"between the copies, {what} in {names}")


def _lengths(column: Any) -> Ints:
    return column_of(column).lengths if len(column) else np.zeros(0, np.int64)


def _last_changes(changes: pa.Table) -> pa.Table:
    """Return the last change of each key (SEGMENT_SCHEMA)."""
    if not len(changes):
        return changes
    group, lsn, seq = (to_numpy(changes[name]).astype(np.int64) for name in ("group", "lsn", "seq"))
    last = find_last(group, column_of(changes["key"]), lsn, seq)
    if last is None:
        raise NotRebuildableError("two keys that changed between the copies have the same hash")
    return changes.filter(to_mask(last))


def _count_lines(lines: pa.Table, scope: _Scope) -> pa.Table:
    """Return the changes of tables without a key (COMPARED_SCHEMA): lines that count there, or have to be undone."""
    is_insert = to_numpy(lines["op"]) == INSERT
    # If the other copy is newer, it has the lines that the window inserted, and lacks those that it deleted.
    is_added = ~is_insert if scope.is_there_newer else is_insert
    return pa.concat_tables(
        [
            _compared(lines.filter(to_mask(is_added)), scope.rules, there=1, in_window=1),
            _compared(lines.filter(to_mask(~is_added)), scope.rules, undone=1, in_window=1),
        ]
    )


def _distinct(lines: pa.Table) -> pa.Table:
    """Return each line of each group once (BASE_SCHEMA)."""
    table = lines.select(BASE_SCHEMA.names)
    if not len(table):
        return BASE_SCHEMA.empty_table()
    hashes, group = xxhash64(column_of(table["row"])), to_numpy(table["group"])
    _, first = np.unique(np.stack([hashes, group.astype(np.uint64)]), axis=1, return_index=True)
    return table.take(to_arrow(first)).cast(BASE_SCHEMA)


def _compared(table: Any, rules: _Rules, **counts: int) -> pa.Table:
    """Return rows with the columns group, key and row as COMPARED_SCHEMA, with these counts."""
    count = len(table)
    if not count:
        return COMPARED_SCHEMA.empty_table()
    group, lines = to_numpy(table["group"]), column_of(table["row"])
    keys = column_of(table["key"])
    h1 = xxhash64(keys)
    entries, h2 = xxhash64(lines, h1), xxhash64(keys, h1)
    if rules.multisets:
        is_line, of_line = rules.are_lines(group), xxhash64(lines)
        h1, h2 = np.where(is_line, of_line, h1), np.where(is_line, xxhash64(lines, of_line), h2)
    columns: dict[str, Any] = {
        "group": to_arrow(group.astype(np.int32)),
        "h1": to_arrow(h1.view(np.int64)),
        "h2": to_arrow(h2.view(np.int64)),
        **{name: to_arrow(np.full(count, counts.get(name, 0), np.int64)) for name in COUNTS},
        "problem": pa.nulls(count, pa.string()),
    }
    for side, name in zip(("here", "there"), ENTRIES, strict=True):
        columns[name] = to_arrow(entries.view(np.int64)) if counts.get(side) else pa.nulls(count, pa.int64())
    return pa.table([columns[name] for name in COMPARED_SCHEMA.names], schema=COMPARED_SCHEMA)


def _read_rows(location: StoreLocation, base: BaseSource) -> Iterator[pa.Table]:
    """Read an object's rows (BASE_SCHEMA) in the schema of the comparison."""
    for table in read_tables(location.open(), base.source, BASE_SCHEMA):
        yield from converted_to_cut(table, base)


def _read_compared(
    location: StoreLocation, base: BaseSource, rules: _Rules, changed: Mapping[int, Keys]
) -> Iterator[pa.Table]:
    """Read an object's rows of the groups as COMPARED_SCHEMA, without the rows there that changed."""
    is_there = base.source.number == 1
    for table in _read_rows(location, base):
        for batch in table.to_batches():
            keep = np.isin(to_numpy(batch.column("group")), list(rules.groups))
            if is_there and changed:
                keep &= find_valid_rows(batch, base, changed)
            chosen = pa.Table.from_batches([batch]).filter(to_mask(keep))
            yield _compared(chosen, rules, **({"there": 1} if is_there else {"here": 1}))


def _compare(scope: _Scope, window: _Window, work: Work) -> pa.Table:
    """Compare the rows of both copies; return FOUND_SCHEMA. Raises ObjectDamagedError and errors of the store."""
    sources = scope.sources()
    size, rows = sum(one.source.size for one in sources), sum(sum(one.rows.values()) for one in sources)
    if not work.is_local(size, rows):
        return _compare_in_job(scope, window, work, sources)
    parts = work.run_here(
        lambda base: list(_read_compared(work.location, base, window.rules, window.changed)), list(sources)
    )
    table = pa.concat_tables([window.in_window, *(table for part in parts for table in part)]).drop_columns(["problem"])
    sums = [(name, "sum") for name in COUNTS] + [(name, "max") for name in ENTRIES]
    names = [*IDENTITY, *(f"{name}_sum" for name in COUNTS), *(f"{name}_max" for name in ENTRIES)]
    grouped = table.group_by(IDENTITY).aggregate(sums).select(names).rename_columns([*IDENTITY, *COUNTS, *ENTRIES])
    return _find(grouped.append_column("problem", pa.nulls(len(grouped), pa.string())), window.rules)


def _compare_in_job(scope: _Scope, window: _Window, work: Work, sources: BaseSources) -> pa.Table:
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    session, location = work.session(), work.location
    sent = broadcast(session, (window.rules, dict(window.changed)))

    def read(_number: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
        rules, changed = sent.value
        try:
            for table in _read_compared(location, base, rules, changed):
                yield from table.to_batches()
        except SnapshotError as error:
            values: dict[str, Any] = dict.fromkeys(COMPARED_SCHEMA.names, 0)
            values |= {"group": PROBLEM, "problem": json.dumps(report_of(error))}
            yield pa.RecordBatch.from_pylist([values], schema=COMPARED_SCHEMA)

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from _find(pa.Table.from_batches([batch]), sent.value[0]).to_batches()

    groups = dict.fromkeys((0, 1), scope.rules.groups)
    frame: DataFrame = read_bases(session, sources, groups, read, COMPARED_ROWS)
    if len(window.in_window):
        frame = frame.unionByName(local_frame(session, window.in_window))
    sums = [F.sum(name).alias(name) for name in COUNTS] + [F.max(name).alias(name) for name in (*ENTRIES, "problem")]
    found = map_batches(frame.groupBy(*IDENTITY).agg(*sums), find, FOUND_ROWS).persist()
    try:
        with work.showing_stages():
            counts = [F.sum(name).alias(name) for name in ("lost", "unsure", "doubtful")]
            summaries = found.where(f"kind = {SUMMARY}").groupBy("kind", "group").agg(*counts)
            first = summaries.selectExpr(
                "kind", "`group`", "0L AS h1", "lost", "unsure", "doubtful", "CAST(NULL AS string) AS problem"
            ).unionByName(found.where(f"kind = {UNREAD}"))
            # Bounded by the groups and the objects.
            summary = first.toArrow().cast(FOUND_SCHEMA)
            _raise_problems(summary)
            _check_counts(summary, scope, window.rules)
            # Bounded by the lost rows, which have been counted, and by the window.
            return pa.concat_tables([summary, found.where(f"kind IN ({KEY}, {LINE})").toArrow().cast(FOUND_SCHEMA)])
    finally:
        found.unpersist()
        sent.unpersist()


def _find(grouped: pa.Table, rules: _Rules) -> pa.Table:
    """Return what the counts of rows (COMPARED_SCHEMA, each identity once) show, as FOUND_SCHEMA."""
    unread = grouped.filter(pc.is_valid(grouped["problem"]))
    grouped = grouped.filter(pc.is_null(grouped["problem"]))
    group = to_numpy(grouped["group"])
    here, there, undone, in_window = (to_numpy(grouped[name]) for name in COUNTS)
    here_entry, there_entry = (to_numpy(grouped[name].fill_null(0)) for name in ENTRIES)
    is_line = rules.are_lines(group)
    total = np.where(is_line, there - undone, there)
    is_sure = (in_window == 0) & ~np.isin(group, list(rules.truncated))
    is_missing, differs = (here == 1) & (there == 0), (here == 1) & (there == 1) & (here_entry != there_entry)
    doubtful = np.where(is_line, here > total, (here > 1) | (there > 1) | (is_sure & (is_missing | differs)))
    lost = np.where(is_line, total - here, (here == 0) & (there == 1) & is_sure)
    unsure = ~is_line & ~is_sure & (here == 0)
    parts = [_found(UNREAD, to_numpy(unread["group"]), problem=unread["problem"].combine_chunks())]
    for number in np.unique(group).tolist():
        chosen = group == number
        sums = {name: np.array([values[chosen].sum()]) for name, values in _named(lost, unsure, doubtful)}
        parts.append(_found(SUMMARY, np.array([number]), **sums))
    if not rules.is_whole:
        is_lost = ~is_line & (here == 0) & (there == 1)
        parts.append(_found(KEY, group[is_lost], h1=to_numpy(grouped["h1"])[is_lost]))
    is_changed = is_line & (in_window > 0)
    parts.append(_found(LINE, group[is_changed], h1=to_numpy(grouped["h1"])[is_changed], lost=total[is_changed]))
    return pa.concat_tables(parts)


def _named(lost: Any, unsure: Any, doubtful: Any) -> Iterable[tuple[str, Any]]:
    return zip(("lost", "unsure", "doubtful"), (lost, unsure, doubtful), strict=True)


def _found(kind: int, group: Any, problem: Any = None, **columns: Any) -> pa.Table:
    count = len(group)
    values: dict[str, Any] = {
        name: to_arrow(np.asarray(columns.get(name, np.zeros(count)), np.int64))
        for name in ("h1", "lost", "unsure", "doubtful")
    }
    values |= {
        "kind": to_arrow(np.full(count, kind, np.int8)),
        "group": to_arrow(np.asarray(group, np.int32)),
        "problem": pa.nulls(count, pa.string()) if problem is None else problem,
    }
    return pa.table([values[name] for name in FOUND_SCHEMA.names], schema=FOUND_SCHEMA)


def _raise_problems(found: pa.Table) -> None:
    for text in found["problem"].drop_null().to_pylist():
        raise error_of(json.loads(text))


def _check_counts(found: pa.Table, scope: _Scope, rules: _Rules) -> None:
    """Raise NotRebuildableError if the copies disagree, or if the lost rows are not as many as the commit says."""
    summaries = found.filter(pc.equal(found["kind"], SUMMARY))
    counts = {row["group"]: row for row in summaries.to_pylist()}  # a row per group
    unit = scope.unit
    if doubtful := {number: row["doubtful"] for number, row in counts.items() if row["doubtful"]}:
        raise NotRebuildableError(
            f"neither copy can be trusted: they disagree about {sum(doubtful.values())} rows of"
            f" {scope.names(doubtful)}, which are in intact objects of {unit.node}"
        )
    expected = scope.expected(scope.lost)
    for number in rules.groups - rules.truncated:
        lost, unsure = (counts[number][name] if number in counts else 0 for name in ("lost", "unsure"))
        if not lost <= expected[number] <= lost + unsure:
            raise NotRebuildableError(
                f"neither copy can be trusted: according to the commit, {expected[number]} rows of"
                f" {scope.names([number])} are lost, but {unit.copy} has {lost} that intact objects of {unit.node} lack"
            )


class _Wanted(Struct, frozen=True):
    """The rows to write: the hashes of the lost keys by group (None: all rows), and the final number of each line.

    `lines` (group, h1, lost) are the lines that changed in the window. `rows` are the rows to write by group; a group
    may have up to `unsure` more or fewer.
    """

    keys: Mapping[int, Hashes] | None
    lines: Mapping[int, tuple[Hashes, Ints]]
    rows: Mapping[int, int]
    unsure: Mapping[int, int]

    def choose(self, table: Any, rules: _Rules) -> Flags:
        """Flag the rows (BASE_SCHEMA) that belong to the new objects and are not among `lines`."""
        group = to_numpy(table["group"])
        chosen = np.isin(group, list(rules.groups))
        if self.keys is not None and chosen.any():
            hashes = xxhash64(column_of(table["key"]))
            for number in np.unique(group[chosen]).tolist():
                of_group = group == number
                chosen[of_group] &= np.isin(hashes[of_group], self.keys.get(number, np.empty(0, np.uint64)))
        if self.lines and chosen.any():
            hashes = xxhash64(column_of(table["row"]))
            for number, (lines, _) in self.lines.items():
                of_group = group == number
                chosen[of_group] &= ~np.isin(hashes[of_group], lines)
        return np.asarray(chosen, np.bool_)


def _judge(found: pa.Table, scope: _Scope, window: _Window) -> _Wanted:
    """Decide which rows are lost; raise NotRebuildableError if the copies disagree."""
    _check_counts(found, scope, window.rules)
    kind, group, h1, lost = (to_numpy(found[name]) for name in ("kind", "group", "h1", "lost"))
    hashes = h1.view(np.uint64)
    lines: dict[int, tuple[Hashes, Ints]] = {}
    for number in scope.rules.multisets:
        chosen = np.flatnonzero((kind == LINE) & (group == number))
        order = chosen[np.argsort(hashes[chosen])]
        if len(order):
            lines[number] = (hashes[order], lost[order])
    if scope.rules.is_whole:
        # The rows there also reflect the inserts and deletes of the window.
        in_window = window.in_window.filter(pc.greater(window.in_window["in_window"], 0))
        changed = Counter(to_numpy(in_window["group"]).tolist()) if scope.is_there_newer else Counter[int]()
        unsure = {number: count for number, count in changed.items() if number not in scope.rules.multisets}
        return _Wanted(None, lines, scope.expected([*scope.lost, *scope.here]), unsure)
    keys = {number: np.unique(hashes[(kind == KEY) & (group == number)]) for number in scope.rules.groups}
    return _Wanted(keys, lines, {number: len(lost_keys) for number, lost_keys in keys.items()}, {})


class _WriteTask(Struct, frozen=True):
    """Objects to read, and the beginning of the keys of the new objects; `known` holds what is common to all tasks."""

    bases: tuple[BaseSource, ...]
    known: Any
    node: str
    beginning: str
    location: StoreLocation

    @property
    def size(self) -> int:
        """The bytes of the objects to read."""
        return sum(base.source.size for base in self.bases)


class _WriteReport(Struct, frozen=True):
    """The new objects, or the error that ended the task."""

    objects: tuple[StoredObject, ...] = ()
    problem: ErrorReport | None = None


def _write_rows(task: _WriteTask) -> _WriteReport:
    """Write the wanted rows of the task's objects to new objects."""
    rules, wanted, changed = task.known.value
    rows = RowWriter.of(task.location, task.node, task.beginning)
    try:
        for base in task.bases:
            for table in _read_rows(task.location, base):
                for batch in table.to_batches():
                    keep = wanted.choose(batch, rules)
                    if changed:
                        keep &= find_valid_rows(batch, base, changed)
                    if keep.any():
                        rows.add(pa.Table.from_batches([batch]).filter(to_mask(keep)))
        rows.close()
    except SnapshotError as error:
        return _WriteReport(problem=report_of(error))
    return _WriteReport(rows.stored)


def _write(
    snapshot: str, operation: str, scope: _Scope, window: _Window, wanted: _Wanted, work: Work
) -> tuple[StoredObject, ...]:
    """Write the new objects."""
    node, sources = scope.unit.node, scope.sources_there()
    # The random part of a key distinguishes the units of a repair.
    beginning = f"{base_prefix(snapshot, node, operation)}/part-{scope.unit.increment:06d}"

    def tasks(known: Any) -> list[_WriteTask]:
        shares = enumerate(_share(sources, wanted), start=1)
        return [_WriteTask(some, known, node, f"{beginning}-{number:06d}", work.location) for number, some in shares]

    size, count = sum(source.source.size for source in sources), sum(sum(source.rows.values()) for source in sources)
    known = (window.rules, wanted, dict(window.changed))
    reports = work.run(_write_rows, tasks, known, lambda task: task.size, is_local=work.is_local(size, count))
    rows = RowWriter.of(work.location, node, f"{beginning}-000000")
    for table in _extra_rows(window, wanted):
        if len(table):
            rows.add(table)
    rows.close()
    return (*rows.stored, *(stored for report in reports for stored in report.objects))


def _share(sources: Sequence[BaseSource], wanted: _Wanted) -> list[tuple[BaseSource, ...]]:
    """Divide the sources so that each share yields about one object."""
    rows, size = sum(sum(one.rows.values()) for one in sources), sum(one.source.size for one in sources)
    written = size * min(sum(wanted.rows.values()) / max(rows, 1), 1.0)
    count = min(max(int(written // OBJECT_BYTES), 1), max(len(sources), 1))
    largest_first = sorted(sources, key=lambda source: -source.source.size)
    return [share for number in range(count) if (share := tuple(largest_first[number::count]))]


def _extra_rows(window: _Window, wanted: _Wanted) -> Iterator[pa.Table]:
    """Yield the rows of the window (BASE_SCHEMA) that belong to the new objects."""
    if len(window.images):
        yield window.images.filter(to_mask(wanted.choose(window.images, window.rules)))
    group = to_numpy(window.lines["group"])
    for number, (lines, copies) in wanted.lines.items():
        of_group = window.lines.filter(to_mask(group == number))
        at = np.searchsorted(lines, xxhash64(column_of(of_group["row"])))
        yield of_group.take(to_arrow(np.repeat(np.arange(len(of_group)), copies[at])))


def _check_written(objects: Iterable[StoredObject], scope: _Scope, rules: _Rules, wanted: _Wanted) -> None:
    """Raise NotRebuildableError unless the new objects have as many rows as expected."""
    written: Counter[int] = Counter()
    for stored in objects:
        written.update(stored.rows)
    for number in rules.groups - rules.truncated:
        rows = wanted.rows.get(number, 0)
        if abs(written[number] - rows) > wanted.unsure.get(number, 0):
            raise NotRebuildableError(
                f"neither copy can be trusted: {rows} rows of {scope.names([number])} have to be replaced, but"
                f" {written[number]} were found in the copy of {scope.unit.copy}"
            )
