"""Read all shards' tables from the nodes, and plan how each table continues from the previous commit.

A table is *converted* to a new definition if all rows stored under the previous definition can be converted
(snapshots/fold/schema_at_cut.py), and every change in between is decoded under one of the two definitions. If that is
not certain, the table is *copied again*, and its previously stored rows no longer count. Columns are identified by
their attribute numbers, which PostgreSQL never reuses.

In a large database, the tables and their states are the most expensive data to read. The fingerprint and the stamps of
the publications show whether they changed since the last commit or the last reading. If they did, a digest of each
table shows which of them must be read again (nodes/changed_tables.py). Files, counters and the privileges of our role
change without a trace in the fingerprint, so they are always read.

Planning works on plain values. Only `publish_new_tables` changes a node: it adds new tables to the publications.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import GroupRules
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.messages import list_some
from cutline.fleet.progress import News, Progress
from cutline.fleet.table_names import ANY, is_included, table_name
from cutline.nodes.changed_tables import find_changed
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.groups import ORDINARY_TABLE, Column, Group, Table, list_names, number_groups, qualify, read_tables
from cutline.nodes.publications import (
    NOWHERE,
    PublicationChangedError,
    TableStamps,
    add_to_publications,
    changed_error,
    check_admissible,
    check_exists,
    check_published,
    have_same_members,
    publication_names,
)
from cutline.nodes.relation_locks import PUBLISHING, bound_lock_waits, locked_error
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.nodes.table_state import TableState, read_counters, read_table_states
from cutline.snapshots.ddl.attempts import DDL_RACE_ERRORS, ChangedError
from cutline.snapshots.ddl.fingerprint import (
    ONE_SNAPSHOT,
    Moment,
    are_same_objects,
    is_unchanged,
    read_again,
    read_moment,
    read_rows,
)
from cutline.snapshots.records.chain import Chain

if TYPE_CHECKING:
    from cutline.wal.segments.archive import Definition

# text and varchar: their values have the same text form, and changing a column from one to the other rewrites nothing.
TEXTS = frozenset({25, 1043})
# Why tables are copied that the last commit lacks, and why those are copied again that are lost.
NEW, JOINING = "it is new", "its shard joins the chain"
LOST_WAL = "its primary is copied again"
LOST_ROWS = "the base copy does not have all of its rows"


class TableBefore(Struct, frozen=True):
    """A table as recorded in the previous commit, or in archived segments that no commit lists.

    In the latter case, `state` is None, and `is_copied` says whether the attempt that archived it copied the table. If
    its rows or the WAL since that commit are lost, `why_lost` says why it is copied again.
    """

    oid: int
    group: Group
    state: TableState | None = None
    is_copied: bool = False
    why_lost: str = ""


class ChangedTable(Struct, frozen=True):
    """A table with a new definition: converted from definition `after`, or copied for `reason` if `after` is None."""

    table: Table
    after: int | None
    reason: str = ""


class ShardPlan(Struct, frozen=True):
    """An increment's plan for a shard's tables.

    `gone` contains the numbers of definitions that end, and `states` the current states of the tables, by name.
    """

    unchanged: tuple[Group, ...]
    changed: tuple[ChangedTable, ...]
    gone: tuple[int, ...]
    states: Mapping[str, TableState]

    @property
    def to_copy(self) -> tuple[Table, ...]:
        """The tables that need a new base copy."""
        return tuple(table.table for table in self.changed if table.after is None)

    @property
    def new_groups(self) -> tuple[Group, ...]:
        """The definitions that begin."""
        return tuple(table.table.group for table in self.changed)

    @property
    def successions(self) -> dict[int, int]:
        """The predecessor of each definition to which rows are converted, by number."""
        return {table.table.group.number: table.after for table in self.changed if table.after is not None}

    @property
    def groups(self) -> tuple[Group, ...]:
        """All of the shard's groups."""
        return (*self.unchanged, *self.new_groups)


def plan_shard(
    node: str,
    before: Iterable[TableBefore],
    archived: Iterable[TableBefore],
    now: tuple[Iterable[Table], Mapping[str, TableState]],
    number: int,
    moved: Collection[int],
    why_new: Callable[[int], str] = lambda _: NEW,
) -> ShardPlan:
    """Compare the shard's current tables and their states by name (`now`) with those in the previous commit.

    `archived` holds the definitions in segments that no commit lists. `moved` holds the oids of tables whose changes in
    WAL have an unknown definition. New definitions get numbers after `number`. `why_new` says, by
    oid, why a table is copied that the commit lacks. Raises PublicationChangedError.
    """
    tables, states = now
    previous = {table_before.oid: table_before for table_before in before}
    attempts: dict[int, list[TableBefore]] = {}
    for table_before in archived:
        attempts.setdefault(table_before.oid, []).append(table_before)
    unchanged: list[Group] = []
    changed: list[ChangedTable] = []
    for table in tables:
        was, state, tried = previous.get(table.oid), states[table.group.name], attempts.get(table.oid, [])
        # Of thousands of tables, nearly all are exactly what they were.
        is_same = was is not None and (was.group is table.group or was.group.definition() == table.group.definition())
        if was and is_same and was.state == state and not (tried or was.why_lost or table.oid in moved):
            unchanged.append(was.group)
            continue
        # Append-only tables have a separate publication, which a table leaves when it gets a replica identity.
        is_same_kind = was and _is_append_only(was.group) == _is_append_only(table.group)
        is_published = was and was.state and not was.why_lost and state.membership and is_same_kind
        if is_published and was and was.state and was.state.publication != state.publication:
            raise _altered_error(node, state.publication, states)
        reason = _why_copy(was, table, state, tried, is_moved=table.oid in moved) if was else why_new(table.oid)
        if not reason and was and is_same and not tried:
            unchanged.append(was.group)
            continue
        number += 1
        if reason or was is None:
            changed.append(ChangedTable(_assign_number(table, number, table.group.partitions), None, reason))
            continue
        # Archived segments already use a number for this definition.
        new_number = tried[0].group.number if tried else number
        changed.append(ChangedTable(_assign_number(table, new_number, was.group.partitions), was.group.number))
    unchanged_numbers = {group.number for group in unchanged}
    gone = tuple(
        sorted(
            table_before.group.number
            for table_before in previous.values()
            if table_before.group.number not in unchanged_numbers
        )
    )
    return ShardPlan(tuple(unchanged), tuple(changed), gone, states)


def _assign_number(table: Table, number: int, partitions: int) -> Table:
    return replace(table, group=structs.replace(table.group, number=number, partitions=partitions))


def _altered_error(node: str, publication: str, states: Mapping[str, TableState]) -> PublicationChangedError:
    """Return the error for a publication that was altered itself: changes to all its tables may be missing."""
    tables = sorted(name for name, state in states.items() if state.publication == publication)
    of = tables[0] if len(tables) == 1 else f"{len(tables):,} tables ({list_some(tables, TABLES_NAMED_MAX)})"
    problem = "was altered or replaced after the last commit; changes may be missing"
    return changed_error(node, f"Cutline's publication of {of} {problem}", tables)


def _why_copy(was: TableBefore, table: Table, state: TableState, tried: list[TableBefore], *, is_moved: bool) -> str:
    """Return the reason why the table needs a new base copy, or "" if it does not need one."""
    if was.why_lost == LOST_WAL:
        return LOST_WAL
    if is_moved:
        return "it was rewritten, or rows were written while its columns or labels of its types were different"
    if any(before.is_copied or before.group.definition() != table.group.definition() for before in tried):
        return "a failed attempt archived it under a different definition"
    if was.state is None:
        return "its state at the last commit is unknown"
    return _why_state(was.state, state) or _why_columns(was.group, was.state, table.group) or was.why_lost


def _why_state(before: TableState, after: TableState) -> str:
    if before.membership != after.membership:
        return "it was taken out of Cutline's publication and put back"
    if before.file != after.file and before.columns != after.columns:
        return "it was rewritten"
    if before.printed - after.printed:
        return "a column's type now prints values differently"
    if _dropped_attributes(before, after):
        return "a column was added and dropped again"
    return ""


def _dropped_attributes(before: TableState, after: TableState) -> bool:
    """Whether an attribute that was added after `before` has been dropped."""
    live = {int(stamp.partition(".")[0]) for stamp in after.columns.split()}
    return any(number not in live for number in range(before.attributes + 1, after.attributes + 1))


def _why_columns(old: Group, before: TableState, new: Group) -> str:
    if _kind(old) != _kind(new):
        return "its replica identity changed"
    if [column.number for column in _key(old)] != [column.number for column in _key(new)]:
        return "its key changed"
    was = {column.number: column for column in old.columns}
    now = {column.number: column for column in new.columns}
    for number in was.keys() & now.keys():
        types = {was[number].type_oid, now[number].type_oid}
        if len(types) > 1 and not types <= TEXTS:
            return f"column {now[number].name} has a different type"
    added, dropped = now.keys() - was.keys(), was.keys() - now.keys()
    if any(number <= before.attributes for number in added):
        return "a generated column became an ordinary one"
    if dropped and added:
        # Decoding could confuse the two columns: the dropped column may have had the other's name and type in between,
        # and a change between some types leaves no trace.
        return "a column was dropped and another was added"
    return ""


def _is_append_only(group: Group) -> bool:
    return group.identity == "append_only"


def _kind(group: Group) -> str:
    """Return the kind of the replica identity; rows keep their keys if it does not change."""
    return "key" if group.key_width else group.identity


def _key(group: Group) -> tuple[Column, ...]:
    return group.columns[: group.key_width]


# Files and privileges change without a trace in the fingerprint. Of the tables in %(oids)s, return those whose file is
# no longer the one in %(files)s, and those of which our role may not read all rows; and return all other tables.
UNTRACED_QUERY = f"""
SELECT c.oid::bigint, n.nspname, c.relname, k.oid IS NOT NULL, file.node, may.read
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN unnest(%(oids)s::oid[], %(files)s::oid[]) AS k (oid, file) ON k.oid = c.oid
 CROSS JOIN (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS ours
 CROSS JOIN LATERAL (SELECT CASE WHEN c.relfilenode <> 0 THEN c.relfilenode::bigint
                                 ELSE pg_relation_filenode(c.oid)::bigint END) AS file (node)
 CROSS JOIN LATERAL (SELECT rolsuper OR coalesce(has_table_privilege(c.oid, 'SELECT'), true)
                                        AND NOT row_security_active(c.oid)) AS may (read)
 WHERE {ORDINARY_TABLE} AND (k.oid IS NULL OR file.node <> k.file::bigint OR NOT may.read)
"""
# The fingerprint and the publications must be of the same moment: later readings compare only the former.
PARTITION_ROWS = 1 << 18
# Each of up to ALONE_MAX tables has a line of its own; of more, only TABLES_NAMED_MAX are named, in one line.
ALONE_MAX, TABLES_NAMED_MAX = 20, 5
LOCK_SECONDS_MIN = 5.0
# An attempt publishes tables at most this often, while others create more.
PUBLISHING_ROUNDS_MAX = 4


class TableSelection(Struct, frozen=True):
    """The tables in a chain: `rules` select them, and they are in the publications of the fleet `fleet_id`."""

    fleet_id: str
    rules: GroupRules


class KnownTables(Struct, frozen=True):
    """The tables at the last commit, by shard; `highest` is the highest group number ever used.

    All tables of the shards in `lost` are copied again, because WAL since the last commit is lost. So are those whose
    groups have the numbers in `without_rows`, by shard. `joining` are the shards that join the chain, and `unread` are
    the oids of tables, by shard, that a base copy named but did not copy, so it no longer has them. The states of the
    shards `of_fingerprint` were read together with their fingerprints (Chain.are_states_of_fingerprint).
    """

    groups: Mapping[str, tuple[Group, ...]]
    states: Mapping[str, Mapping[str, TableState]]
    fingerprints: Mapping[str, str]
    highest: int
    lost: frozenset[str] = frozenset()
    of_fingerprint: frozenset[str] = frozenset()
    without_rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    joining: frozenset[str] = frozenset()
    unread: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def why_new(self, shard: str, oid: int) -> str:
        """Return the reason why a table is copied that is not among `groups`."""
        if shard in self.joining:
            return JOINING
        return LOST_ROWS if oid in self.unread.get(shard, ()) else NEW

    def before(self, shard: str, without: Set[int] = frozenset()) -> tuple[TableBefore, ...]:
        """Return the shard's tables for the plan's comparison, without the groups with these numbers."""
        states, without_rows = self.states[shard], self.without_rows.get(shard, frozenset())
        why = LOST_WAL if shard in self.lost else ""
        groups = [group for group in self.groups[shard] if group.number not in without]
        return tuple(
            TableBefore(
                states[name].oid, group, states[name], why_lost=LOST_ROWS if group.number in without_rows else why
            )
            for group, name in zip(groups, list_names(groups), strict=True)
        )


def known_tables(chain: Chain, joining: Iterable[str] = (), lost: Collection[str] = ()) -> KnownTables:
    """Return the tables at the chain's last commit; shards that are `joining` it have none yet.

    All tables of the shards in `lost` are copied again; other names in it are ignored.
    """
    shards, new = chain.primaries, tuple(joining)
    # No number is used again, not even one of a shard that has left the chain.
    ever = {chain.shard_of(node) for node in chain.all_nodes}
    highest = max((max(chain.definitions(shard), default=0) for shard in ever), default=0)
    return KnownTables(
        {**chain.all_groups, **dict.fromkeys(new, ())},
        {**{shard: chain.tables(shard) for shard in shards}, **{shard: {} for shard in new}},
        {**{shard: chain.fingerprint(shard) for shard in shards}, **dict.fromkeys(new, "")},
        highest,
        frozenset(shard for shard in shards if shard in lost),
        frozenset(shard for shard in shards if chain.are_states_of_fingerprint(shard)),
        joining=frozenset(new),
    )


# The dictionary is for cached properties.
class NodeTables(Struct, frozen=True, dict=True):
    """A primary's tables, their states, and the fingerprint of its catalogs, all as of the same moment.

    They were `read`, or are those of the last commit, which has the `committed` groups but lacks the sizes of their
    tables; if none was read, files and counters were read after the fingerprint. `find_change` compares the fingerprint
    again at the end. `moment` is when the fingerprint was read.
    """

    read: tuple[Table, ...]
    states: Mapping[str, TableState]
    fingerprint: str
    moment: Moment
    committed: tuple[Group, ...] | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the tables."""
        return (*(self.committed or ()), *(table.group for table in self.read))

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables; those of the last commit are made only now: few increments need any of the many thousands."""
        return self.tables_of(None)

    def tables_of(self, oids: Set[int] | None) -> tuple[Table, ...]:
        """Return the tables that were read, and of those of the last commit these."""
        if not self.committed or (oids is not None and not oids):
            return self.read
        found = zip((self.states[name].oid for name in list_names(self.committed)), self.committed, strict=True)
        committed = [
            Table(oid, group, rows_estimate=None, size_bytes=0, readable=True, key_is_immediate=None)
            for oid, group in found
            if oids is None or oid in oids
        ]
        return _in_order([*committed, *self.read])


def _in_order(tables: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(sorted(tables, key=lambda table: (table.group.schema, table.group.table)))


class DdlPlan(Struct, frozen=True):
    """An increment's plan for all shards' tables, and the tables that it is based on."""

    shards: Mapping[str, ShardPlan]
    node_tables: Mapping[str, NodeTables]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every shard's catalogs."""
        return {shard: tables.fingerprint for shard, tables in self.node_tables.items()}

    @property
    def unpublished(self) -> dict[str, list[str]]:
        """The names of tables in none of Cutline's publications, by shard; shards without such tables are omitted."""
        return list_unpublished(self.node_tables)

    @property
    def to_copy(self) -> dict[str, list[Table]]:
        """The tables that need a new base copy, by shard; shards without such tables are omitted."""
        return {shard: list(plan.to_copy) for shard, plan in self.shards.items() if plan.to_copy}


def read_node_tables(
    connection: psycopg.Connection[Any], node: str, selection: TableSelection, *, accepts_altered: bool = False
) -> NodeTables:
    """Read the node's tables, their states and the fingerprint, all from one snapshot of the server.

    With `accepts_altered`, publications that the command repairs later raise no error.

    Values from the server's functions (sizes, files, privileges) may be more recent, but a change in between also
    changes the fingerprint, so a later comparison detects it.
    """
    with connection.transaction():
        connection.execute(ONE_SNAPSHOT)
        tables = read_tables(connection, selection.rules)
        states = read_table_states(connection, node, selection.fleet_id, tables, accepts_altered=accepts_altered)
        rows, moment = read_rows(connection)
        return NodeTables(tuple(tables), states, read_again(connection, "", rows), moment)


def list_unpublished(node_tables: Mapping[str, NodeTables]) -> dict[str, list[str]]:
    """Return the names of tables in none of Cutline's publications, by shard; omit shards without such tables."""
    unpublished = {
        shard: [name for name, state in tables.states.items() if not state.membership]
        for shard, tables in node_tables.items()
    }
    return {shard: names for shard, names in unpublished.items() if names}


def read_fleet_tables(sessions: Sessions, selection: TableSelection) -> dict[str, NodeTables]:
    """Read the tables of all primaries, and number their groups in order of their names.

    Raises TableNotAdmissibleError, and PublicationChangedError, also if `init` has not created the publications.
    """

    def read(connection: psycopg.Connection[Any], node: str) -> NodeTables:
        for name in publication_names(selection.fleet_id):
            check_exists(connection, node, name)
        return read_node_tables(connection, node, selection)

    return _read_primaries(sessions, read)


def read_current_tables(
    sessions: Sessions, selection: TableSelection, seen: Mapping[str, NodeTables]
) -> dict[str, NodeTables]:
    """Do the same as `read_fleet_tables`, but read a node in `seen` again only if it changed."""

    def read(connection: psycopg.Connection[Any], node: str) -> NodeTables:
        was = seen.get(node)
        now = _read_since(connection, node, selection, was) if was else None
        return now or read_node_tables(connection, node, selection)

    return _read_primaries(sessions, read)


def read_tables_since_commit(
    sessions: Sessions,
    selection: TableSelection,
    find_known: Callable[[], KnownTables],
    unknown: Collection[str] = (),
    altered: Container[str] = (),
) -> tuple[KnownTables, dict[str, NodeTables]]:
    """Do the same as `read_fleet_tables`, but take the tables that have not changed from the last commit.

    Returns the tables at that commit, too: `find_known` finds them while the servers search their catalogs. It must use
    no session. The tables of the nodes in `unknown` are read in any case; the publications of those in `altered`, which
    are among them, need not be right yet.
    """

    def find() -> tuple[KnownTables, Mapping[str, _Committed]]:
        known = find_known()
        found = ((node, _as_committed(node, known)) for node in sessions.primaries if node not in unknown)
        return known, {node: committed for node, committed in found if committed}

    def read(connection: psycopg.Connection[Any], node: str) -> NodeTables:
        now = None
        if node not in unknown:
            now = _read_as_committed(connection, node, selection, lambda: finding.result()[1].get(node))
        return now or read_node_tables(connection, node, selection, accepts_altered=node in altered)

    with ThreadPoolExecutor(max_workers=1) as threads:
        finding = threads.submit(find)
        tables = _read_primaries(sessions, read)
        return finding.result()[0], tables


def _read_as_committed(
    connection: psycopg.Connection[Any],
    node: str,
    selection: TableSelection,
    find_committed: Callable[[], _Committed | None],
) -> NodeTables | None:
    """Return the node's tables, as in the last commit if they have not changed; None if this can't be known.

    `find_committed` returns what the commit has of them. It is called after the server has searched its catalogs.
    """
    with connection.transaction():
        connection.execute(ONE_SNAPSHOT)
        rows, moment = read_rows(connection)
        if (committed := find_committed()) is None:
            return None
        was = NodeTables((), committed.states, committed.fingerprint, moment, committed.groups)
        now = read_again(connection, was.fingerprint, rows)
        is_stored = not committed.is_of_fingerprint
        if _describe_change(connection, node, selection.fleet_id, was, now, is_stored=is_stored):
            return _read_changed(connection, node, selection, replace(was, fingerprint=now))
    return _with_untraced(connection, replace(was, fingerprint=now), committed.files, selection.rules)


def _read_primaries(
    sessions: Sessions, read: Callable[[psycopg.Connection[Any], str], NodeTables]
) -> dict[str, NodeTables]:
    """Read the tables of all primaries, check that they can be copied, and number their groups."""

    def read_node(node: str) -> NodeTables:
        with raising_unreachable(sessions.fleet.node(node)):
            return read(sessions.connections[node], node)

    primaries = list(sessions.primaries)
    found = dict(zip(primaries, in_parallel(read_node, primaries), strict=True))
    # The tables of a commit were admissible, which its rules prove, and have numbers.
    tables = {node: node_tables.read for node, node_tables in found.items() if node_tables.read}
    check_admissible(tables)
    if all(all(table.group.number for table in some) for some in tables.values()):
        # All of them were numbered together before.
        return found
    numbered = number_groups({node: list(some) for node, some in tables.items()}, PARTITION_ROWS)
    return found | {node: replace(found[node], read=tuple(some)) for node, some in numbered.items()}


class _Committed(NamedTuple):
    """A node's tables in the last commit, and their oids and `files` as UNTRACED_QUERY takes them.

    `is_of_fingerprint` is as in KnownTables.
    """

    groups: tuple[Group, ...]
    states: Mapping[str, TableState]
    fingerprint: str
    files: Mapping[str, str]
    is_of_fingerprint: bool


def _as_committed(node: str, known: KnownTables) -> _Committed | None:
    """Return the tables in the last commit; None if its states do not suffice to tell whether they have changed."""
    groups, states = known.groups[node], known.states[node]
    lacks_states = not states.keys() >= {*list_names(groups)}
    if lacks_states or any(state.has_names for state in states.values() if state.types):
        return None
    # Texts: psycopg takes ten times as long for a list.
    files = {
        "oids": f"{{{','.join([str(state.oid) for state in states.values()])}}}",
        "files": f"{{{','.join([str(state.file) for state in states.values()])}}}",
    }
    return _Committed(groups, states, known.fingerprints[node], files, node in known.of_fingerprint)


def _may_exclude(rules: GroupRules) -> bool:
    return bool(rules.exclude) or ANY not in rules.include


def _with_untraced(
    connection: psycopg.Connection[Any], was: NodeTables, known: Mapping[str, str], rules: GroupRules
) -> NodeTables | None:
    """Return the tables with their files, which were the `known` ones, and counters as they are now.

    Returns None if `rules` include other tables than these, or if our role may not read all of their rows.
    """
    if _may_exclude(rules) and not all(is_included(name, rules) for name in was.states):
        return None
    states = was.states.values()
    files: dict[int, int] = {}
    for oid, schema, name, is_known, file, is_readable in connection.execute(UNTRACED_QUERY, known):
        if not is_known and not is_included(table_name(schema, name), rules):
            continue
        if not is_known or not is_readable:
            return None
        files[oid] = file
    counted = [state.oid for state in states if state.counted]
    counters = read_counters(connection, counted) if counted else {}
    now = {
        name: structs.replace(state, file=files.get(state.oid, state.file), counted=counters.get(state.oid))
        for name, state in was.states.items()
        if state.oid in files or state.counted
    }
    return replace(was, states={**was.states, **now}) if now else was


def _read_changed(
    connection: psycopg.Connection[Any], node: str, selection: TableSelection, was: NodeTables
) -> NodeTables | None:
    """Return the tables as they are now; only those that are not what they `was` are read.

    The session is in a transaction with a single snapshot, which is that of the fingerprint and the moment. Returns
    None if it can't be known which tables have changed.
    """
    found = find_changed(connection, selection.fleet_id, was.groups, was.states)
    if found is None:
        return None
    new = [oid for oid, name in found.others.items() if is_included(name, selection.rules)]
    excluded = set[int]()
    if _may_exclude(selection.rules):
        excluded = {state.oid for name, state in was.states.items() if not is_included(name, selection.rules)}
    now = _read_some(connection, node, selection, was, found.changed.union(new), found.gone | excluded)
    counted = [state.oid for state in now.states.values() if state.counted]
    counters = read_counters(connection, counted) if counted else {}
    later = {
        name: structs.replace(state, counted=counters[state.oid])
        for name, state in now.states.items()
        if state.oid in counters
    }
    return replace(now, states={**now.states, **later})


def _read_some(
    connection: psycopg.Connection[Any],
    node: str,
    selection: TableSelection,
    was: NodeTables,
    oids: Set[int],
    gone: Set[int] = frozenset(),
) -> NodeTables:
    """Return the tables without those that are `gone`, and with those with these `oids` as they are now."""
    read = read_tables(connection, selection.rules, oids) if oids else []
    states = read_table_states(connection, node, selection.fleet_id, read, are_few=True)
    kept = {name: state for name, state in was.states.items() if state.oid not in oids and state.oid not in gone}
    committed = None
    if was.committed is not None:
        names = list_names(was.committed)
        committed = tuple(group for group, name in zip(was.committed, names, strict=True) if name in kept)
    still = [table for table in was.read if table.group.name in kept]
    return replace(was, read=_in_order([*still, *read]), states={**kept, **states}, committed=committed)


def read_sizes(
    sessions: Sessions, selection: TableSelection, seen: Mapping[str, NodeTables], oids: Mapping[str, Set[int]]
) -> dict[str, NodeTables]:
    """Read the tables with these `oids`, by shard, which are those of the last commit, to know their sizes."""

    def read(connection: psycopg.Connection[Any], node: str) -> NodeTables:
        if not (some := oids.get(node)):
            return seen[node]
        with connection.transaction():
            connection.execute(ONE_SNAPSHOT)
            return _read_some(connection, node, selection, seen[node], some)

    return _read_primaries(sessions, read)


def plan_ddl(
    node_tables: Mapping[str, NodeTables],
    known: KnownTables,
    archived: Mapping[str, Iterable[Definition]],
    moved: Mapping[str, set[int]],
) -> DdlPlan:
    """Compare the current `node_tables` with the tables `known` from the last commit.

    `archived` holds, by shard, the definitions in segments that no commit lists. `moved` holds the oids of tables whose
    changes in WAL have an unknown definition. Raises PublicationChangedError.
    """
    tried = {shard: [_archived_table(definition) for definition in archived.get(shard, ())] for shard in node_tables}
    highest = max([known.highest, *(table.group.number for tables in tried.values() for table in tables)])
    shards: dict[str, ShardPlan] = {}
    for shard, one in node_tables.items():
        is_lost = shard in known.lost or known.without_rows.get(shard)
        if one.states is known.states[shard] and not (tried[shard] or moved.get(shard) or is_lost):
            # Of many thousands of tables, none has changed.
            shards[shard] = ShardPlan(known.groups[shard], (), (), one.states)
            continue
        # Tables that are those of the last commit are unchanged, unless WAL or a failed attempt shows otherwise.
        doubted = None if is_lost else {*moved.get(shard, ()), *(table.oid for table in tried[shard])}
        tables = one.tables_of(doubted)
        compared = {table.oid for table in tables}
        names = list_names(one.committed or ())
        same = [
            group
            for group, name in zip(one.committed or (), names, strict=True)
            if one.states[name].oid not in compared
        ]
        before = known.before(shard, {group.number for group in same})
        now, why_new = (tables, one.states), partial(known.why_new, shard)
        plan = plan_shard(shard, before, tried[shard], now, highest, moved.get(shard, ()), why_new)
        shards[shard] = replace(plan, unchanged=(*same, *plan.unchanged))
        highest = max([highest, *(group.number for group in plan.groups)])
    return DdlPlan(shards, node_tables)


def _archived_table(definition: Definition) -> TableBefore:
    return TableBefore(definition.oid, definition.group, is_copied=definition.copied_from is not None)


def report_changes(plan: DdlPlan, progress: Progress) -> None:
    """Report the tables that changed, and what the increment does with them.

    If all of a shard's tables are copied for the same reason, they are only counted.
    """
    for shard, shard_plan in plan.shards.items():
        names: dict[str, list[str]] = {}
        for table in shard_plan.changed:
            what = f"a new base copy: {table.reason}" if table.after is None else ""
            names.setdefault(what, []).append(table.table.group.name)
        is_whole = len(names) == 1 and not shard_plan.unchanged and "" not in names
        for what, tables in names.items():
            if is_whole and len(tables) > 1:
                progress.note(News(f"node {shard}: all {len(tables):,} tables need {what}"))
                continue
            if len(tables) > ALONE_MAX:
                does = f"need {what}" if what else "have a new definition"
                some = list_some(tables, TABLES_NAMED_MAX)
                progress.note(News(f"node {shard}: {len(tables):,} tables {does} ({some})"))
                continue
            for name in tables:
                progress.note(News(f"node {shard}: table {name} {f'needs {what}' if what else 'has a new definition'}"))


def publish_new_tables(
    sessions: Sessions,
    seen: dict[str, NodeTables],
    selection: TableSelection,
    wait_seconds: float,
    progress: Progress,
) -> None:
    """Add the tables in `seen` that are in no publication to them, and update `seen`.

    Tables that others create meanwhile are added as well. Raises RelationLockedError if a table stays locked, and
    ChangedError if concurrent DDL drops or replaces a table, or does not stop to create tables.
    """
    for _ in range(PUBLISHING_ROUNDS_MAX):
        if not (names := list_unpublished(seen)):
            return
        _publish(sessions, seen, names, selection, wait_seconds, progress)
        progress.reached(CrashPoint.TABLES_PUBLISHED)
        seen.update(read_current_tables(sessions, selection, seen))
    if list_unpublished(seen):
        raise ChangedError("tables were created while new tables were being published")


def _publish(
    sessions: Sessions,
    seen: Mapping[str, NodeTables],
    names: Mapping[str, list[str]],
    selection: TableSelection,
    wait_seconds: float,
    progress: Progress,
) -> None:
    done: dict[str, list[str]] = {}

    def publish(node: str) -> None:
        connection, states = sessions.connections[node], seen[node].states
        seconds, tables = max(wait_seconds, LOCK_SECONDS_MIN), list[Table]()
        try:
            with raising_unreachable(sessions.fleet.node(node)), connection.transaction():
                bound_lock_waits(connection, seconds)
                tables = read_tables(connection, selection.rules, [states[name].oid for name in names[node]])
                add_to_publications(connection, selection.fleet_id, tables)
        except psycopg.errors.LockNotAvailable as error:
            chosen = [qualify(table.group) for table in tables]
            what = "publishing new tables"
            raise locked_error(sessions.fleet.node(node), what, chosen, seconds, modes=PUBLISHING) from error
        except DDL_RACE_ERRORS as error:
            raise ChangedError(f"node {node}: new tables can't be published: {' '.join(str(error).split())}") from error
        done[node] = [table.group.name for table in tables]

    try:
        in_parallel(publish, names)
    finally:
        for node in (name for name in names if done.get(name)):
            some = list_some(done[node], ALONE_MAX)
            progress.note(News(f"node {node}: new tables were published: {some}"))


def find_change(sessions: Sessions, seen: Mapping[str, NodeTables], selection: TableSelection) -> str:
    """Describe a change on a primary since its tables were read as `seen`; return "" if nothing changed.

    Raises PublicationChangedError if one of Cutline's publications was itself altered and has not been repaired.
    """

    def find_on(node: str) -> str:
        connection, was = sessions.connections[node], seen[node]
        with raising_unreachable(sessions.fleet.node(node)), connection.transaction():
            connection.execute(ONE_SNAPSHOT)
            if is_unchanged(connection, was.moment, read_moment(connection)):
                return ""
            now = read_again(connection, was.fingerprint)
            return _describe_change(connection, node, selection.fleet_id, was, now)

    return next(filter(None, in_parallel(find_on, sessions.primaries)), "")


def _read_since(
    connection: psycopg.Connection[Any], node: str, selection: TableSelection, was: NodeTables
) -> NodeTables | None:
    """Return the node's tables and their fingerprint as they are now; None if it can't be known what has changed."""
    with connection.transaction():
        connection.execute(ONE_SNAPSHOT)
        moment = read_moment(connection)
        if is_unchanged(connection, was.moment, moment):
            return replace(was, moment=replace(moment, counts=was.moment.counts))
        rows, moment = read_rows(connection)
        now = read_again(connection, was.fingerprint, rows)
        is_changed = _describe_change(connection, node, selection.fleet_id, was, now)
        was = replace(was, fingerprint=now, moment=moment)
        return _read_changed(connection, node, selection, was) if is_changed else was


def _describe_change(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    was: NodeTables,
    fingerprint: str,
    *,
    is_stored: bool = False,
) -> str:
    """Describe a change since the node's tables were read as `was`, given the current fingerprint; "" if there is none.

    The hash of the objects does not cover Cutline's publications. Unless no row of any catalog has changed since the
    states were read, these are compared separately. They may have other members, such as tables that fleet.toml has
    excluded since. If the fingerprint `is_stored`, increments since then may have stored other states.
    """
    if not are_same_objects(fingerprint, was.fingerprint):
        return f"node {node}: its catalogs changed"
    if fingerprint == was.fingerprint and not is_stored:
        return ""
    states = (state for state in was.states.values() if state.membership)
    members = (TableStamps(state.oid, state.publication, state.membership) for state in states)
    if have_same_members(connection, fleet_id, members):
        return ""
    published = check_published(connection, node, fleet_id, was.groups)
    for name, state in was.states.items():
        now = published.get(name, NOWHERE)
        if (now.publication, now.membership) != (state.publication, state.membership):
            return f"node {node}: the publication of table {name} changed"
    return ""
