"""What became of all shards' tables since the commit before: the nodes are asked, and their answers compared.

Reading tables and states costs a large database more than all the rest, so they are read once, and from then on the
fingerprint and the publications' stamps tell whether they still are what they were: `read_current_tables` reads
again what is not.

`snapshots.ddl.table_plan` compares; here only `add_to_publications` changes a node: it adds new
tables to the publications.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psycopg

from fleet.config import GroupRules
from fleet.nodes.connections import raising_unreachable
from fleet.nodes.relation_locks import PUBLISHING, bound_lock_waits, locked_error
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.progress import Progress
from fleet.tables.groups import Group, Table, number_groups, qualify, read_tables
from fleet.tables.publications import NOWHERE, check_admissible, check_published, ensure_publications
from fleet.tables.table_state import TableState, read_table_states
from snapshots.ddl.attempts import PASSING, ChangedError
from snapshots.ddl.fingerprint import read_fingerprint
from snapshots.ddl.table_plan import ShardPlan, TableBefore, plan_shard
from snapshots.records.chain import Chain

if TYPE_CHECKING:
    from wal.segments.definitions import Definition

PARTITION_ROWS = 1 << 18
LOCK_SECONDS_MIN = 5.0


@dataclass(frozen=True, slots=True)
class TableSelection:
    """Which tables a chain follows: `rules` choose them, and the publications of the fleet `fleet_id` hold them."""

    fleet_id: str
    rules: GroupRules


@dataclass(frozen=True, slots=True)
class KnownTables:
    """What is known of the tables before a cut: groups and states by shard, and the highest number ever given."""

    groups: Mapping[str, tuple[Group, ...]]
    states: Mapping[str, Mapping[str, TableState]]
    fingerprints: Mapping[str, str]
    highest: int

    def before(self, shard: str) -> list[TableBefore]:
        """The shard's tables as the plan compares them."""
        states = self.states[shard]
        return [TableBefore(states[one.name].oid, one, states[one.name]) for one in self.groups[shard]]


def known_tables(chain: Chain) -> KnownTables:
    """What the chain's last commit knows."""
    shards = chain.full.groups
    highest = max((number for shard in shards for number in chain.definitions(shard)), default=0)
    return KnownTables(
        chain.all_groups,
        {shard: chain.tables(shard) for shard in shards},
        {shard: chain.fingerprint(shard) for shard in shards},
        highest,
    )


@dataclass(frozen=True, slots=True)
class NodeTables:
    """A primary's tables and their states at one moment, and the fingerprint of its catalogs then."""

    tables: tuple[Table, ...]
    states: Mapping[str, TableState]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class DdlPlan:
    """What an increment makes of all shards' tables, and the catalogs that it is made from."""

    shards: Mapping[str, ShardPlan]
    catalogs: Mapping[str, NodeTables]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of every shard's catalogs."""
        return {shard: one.fingerprint for shard, one in self.catalogs.items()}

    @property
    def unpublished(self) -> dict[str, list[str]]:
        """The tables that no publication of Cutline's has, by shard where there are any."""
        return unpublished(self.catalogs)

    @property
    def copied(self) -> dict[str, list[Table]]:
        """The tables to be copied anew, of the shards that have any."""
        return {shard: list(plan.copied) for shard, plan in self.shards.items() if plan.copied}


def read_node_tables(connection: psycopg.Connection[Any], node: str, followed: TableSelection) -> NodeTables:
    """The node's tables, their states and the fingerprint, all as one snapshot of the server shows them.

    What the server's functions add (sizes, files, privileges) may be of a moment later: whatever is changed in between
    gives the catalogs another fingerprint afterwards.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        tables = read_tables(connection, followed.rules)
        states = read_table_states(connection, node, followed.fleet_id, tables, unpublished_too=True)
        return NodeTables(tuple(tables), states, read_fingerprint(connection))


def unpublished(catalogs: Mapping[str, NodeTables]) -> dict[str, list[str]]:
    """Of these catalogs, by shard, the names of the tables that no publication of Cutline's has."""
    found = {
        shard: [name for name, state in one.states.items() if not state.membership] for shard, one in catalogs.items()
    }
    return {shard: names for shard, names in found.items() if names}


def read_fleet_tables(sessions: Sessions, followed: TableSelection) -> dict[str, NodeTables]:
    """The catalogs of all primaries, tables numbered by name.

    Raises TableNotAdmissibleError, PublicationChangedError.
    """
    return read_current_tables(sessions, followed, {})


def read_current_tables(
    sessions: Sessions, followed: TableSelection, seen: Mapping[str, NodeTables]
) -> dict[str, NodeTables]:
    """The tables of all primaries, as `read_fleet_tables` reads them; those `seen` before only where they changed."""

    def read(node: str) -> NodeTables:
        with raising_unreachable(sessions.fleet.node(node)):
            connection = sessions.connections[node]
            if (was := seen.get(node)) and not _change(connection, node, followed.fleet_id, was):
                return was
            return read_node_tables(connection, node, followed)

    primaries = list(sessions.primaries)
    found = dict(zip(primaries, in_parallel(read, primaries), strict=True))
    tables = {node: list(one.tables) for node, one in found.items()}
    check_admissible(tables)
    numbered = number_groups(tables, PARTITION_ROWS)
    return {node: replace(one, tables=tuple(numbered[node])) for node, one in found.items()}


def plan_ddl(
    found: Mapping[str, NodeTables],
    known: KnownTables,
    archived: Mapping[str, Iterable[Definition]],
    moved: Mapping[str, set[int]],
) -> DdlPlan:
    """Compare the primaries' catalogs with what is `known`.

    `archived` are the definitions in segments that no commit lists, by shard; `moved` the oids of tables that were
    changed under definitions that nobody knows. Raises PublicationChangedError.
    """
    tried = {shard: [_archived_versions(version) for version in archived.get(shard, ())] for shard in found}
    highest = max([known.highest, *(one.group.number for ones in tried.values() for one in ones)])
    shards: dict[str, ShardPlan] = {}
    for shard, one in found.items():
        now = (one.tables, one.states)
        shards[shard] = plan_shard(shard, known.before(shard), tried[shard], now, highest, moved.get(shard, ()))
        highest = max([highest, *(group.number for group in shards[shard].groups)])
    return DdlPlan(shards, found)


def _archived_versions(version: Definition) -> TableBefore:
    return TableBefore(version.oid, version.group, is_copied=version.copied_from is not None)


def report_changes(plan: DdlPlan, progress: Progress) -> None:
    """Say which tables have changed, and what becomes of them."""
    for shard, found in plan.shards.items():
        for one in found.changed:
            what = f"is copied anew: {one.reason}" if one.after is None else "has a new definition"
            progress.note(f"node {shard}: table {one.table.group.name} {what}")


def add_to_publications(
    sessions: Sessions,
    names: Mapping[str, list[str]],
    followed: TableSelection,
    wait_seconds: float,
    progress: Progress,
) -> None:
    """Let the tables of these names, by shard, be followed; raise RelationLockedError if one stays locked.

    Raises ChangedError if one was dropped, or is something else, by now.
    """

    def publish(node: str) -> None:
        connection = sessions.connections[node]
        seconds, tables = max(wait_seconds, LOCK_SECONDS_MIN), list[Table]()
        try:
            with raising_unreachable(sessions.fleet.node(node)), connection.transaction():
                bound_lock_waits(connection, seconds)
                tables = read_tables(connection, followed.rules)
                ensure_publications(connection, followed.fleet_id, tables)
        except psycopg.errors.LockNotAvailable as error:
            chosen = [qualify(table.group) for table in tables if table.group.name in names[node]]
            what = "publishing new tables"
            raise locked_error(sessions.fleet.node(node), what, chosen, seconds, modes=PUBLISHING) from error
        except PASSING as error:
            raise ChangedError(f"node {node}: new tables can't be published: {' '.join(str(error).split())}") from error
        progress.note(f"node {node}: new tables are followed: {', '.join(names[node])}")

    in_parallel(publish, names)


def find_change(sessions: Sessions, seen: Mapping[str, NodeTables], followed: TableSelection) -> str:
    """What was changed on a primary since its catalogs were `seen`, "" if nothing was.

    Raises PublicationChangedError if a whole publication of Cutline's was altered and still is.
    """

    def changed(node: str) -> str:
        with raising_unreachable(sessions.fleet.node(node)):
            return _change(sessions.connections[node], node, followed.fleet_id, seen[node])

    return next(filter(None, in_parallel(changed, sessions.primaries)), "")


def _change(connection: psycopg.Connection[Any], node: str, fleet_id: str, was: NodeTables) -> str:
    """What is not as it `was`, "" if all is: the fingerprint leaves out Cutline's own publications."""
    if read_fingerprint(connection) != was.fingerprint:
        return f"node {node}: its schema was changed"
    groups = [table.group for table in was.tables]
    published = check_published(connection, node, fleet_id, groups, unpublished_too=True)
    for name, state in was.states.items():
        now = published.get(name, NOWHERE)
        if (now.publication, now.membership) != (state.publication, state.membership):
            return f"node {node}: table {name} was published otherwise"
    return ""
