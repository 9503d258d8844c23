"""What became of all shards' tables since the commit before: the nodes are asked, and their answers compared.

`snapshots.schema_plan` compares; nothing here changes a node but `publish_new`, which lets new tables be followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg

from fleet.config import GroupRules
from fleet.connections import answering
from fleet.groups import Group, SchemaChangedError, Table, number_groups, qualified, read_tables
from fleet.progress import Progress
from fleet.publications import check_admissible, ensure_publications
from fleet.relation_locks import PUBLISHING, bound_lock_waits, locked_error
from fleet.sessions import Sessions, in_parallel
from fleet.table_state import TableState, read_table_states
from snapshots.fingerprint import read_fingerprint
from snapshots.manifest import Chain
from snapshots.schema_plan import Before, ShardPlan, plan_shard

if TYPE_CHECKING:
    from wal.versions import Version

PARTITION_ROWS = 1 << 18
READINGS_MAX = 5
LOCK_SECONDS_MIN = 5.0


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the tables before a cut: groups and states by shard, and the highest number ever given."""

    groups: Mapping[str, tuple[Group, ...]]
    states: Mapping[str, Mapping[str, TableState]]
    fingerprints: Mapping[str, str]
    highest: int

    def before(self, shard: str) -> list[Before]:
        """The shard's tables as the plan compares them."""
        states = self.states[shard]
        return [Before(states[one.name].oid, one, states[one.name]) for one in self.groups[shard]]


def known_of(chain: Chain) -> Known:
    """What the chain's last commit knows."""
    shards = chain.part.groups
    highest = max((number for shard in shards for number in chain.definitions(shard)), default=0)
    return Known(
        chain.all_groups,
        {shard: chain.tables(shard) for shard in shards},
        {shard: chain.fingerprint(shard) for shard in shards},
        highest,
    )


@dataclass(frozen=True, slots=True)
class Catalogs:
    """A primary's tables and their states at one moment, and the fingerprint of its catalogs then."""

    tables: list[Table]
    states: Mapping[str, TableState]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class SchemaPlan:
    """What an increment makes of all shards' tables; `fingerprints` tell the catalogs that it is made from."""

    shards: Mapping[str, ShardPlan]
    fingerprints: Mapping[str, str]

    @property
    def unpublished(self) -> dict[str, list[str]]:
        """The tables that no publication of Cutline's has, by shard where there are any."""
        return unpublished({shard: plan.states for shard, plan in self.shards.items()})

    @property
    def copied(self) -> dict[str, list[Table]]:
        """The tables to be copied anew, of the shards that have any."""
        return {shard: list(plan.copied) for shard, plan in self.shards.items() if plan.copied}


def read_catalogs(connection: psycopg.Connection[Any], node: str, fleet_id: str, rules: GroupRules) -> Catalogs:
    """The node's tables, all as of one moment; raise SchemaChangedError if the schema is changed all the time."""
    for _ in range(READINGS_MAX):
        fingerprint = read_fingerprint(connection)
        tables = read_tables(connection, rules)
        states = read_table_states(connection, node, fleet_id, tables, unpublished_too=True)
        if read_fingerprint(connection) == fingerprint:
            return Catalogs(tables, states, fingerprint)
    raise SchemaChangedError(
        f"node {node}: its schema was changed each of {READINGS_MAX} times that it was read",
        hint="repeat the command once nobody changes the schema",
        details={"node": node},
    )


def unpublished(states: Mapping[str, Mapping[str, TableState]]) -> dict[str, list[str]]:
    """Of the states, by shard, the names of those tables that no publication of Cutline's has."""
    found = {shard: [name for name, one in known.items() if not one.membership] for shard, known in states.items()}
    return {shard: names for shard, names in found.items() if names}


def read_all(sessions: Sessions, where: tuple[str, GroupRules]) -> tuple[dict[str, list[Table]], dict[str, Catalogs]]:
    """The tables of all primaries, numbered by name, and their catalogs; `where` are the fleet's id and the rules.

    Raises TableNotAdmissibleError, PublicationChangedError.
    """

    def read(node: str) -> Catalogs:
        with answering(sessions.fleet.node(node)):
            return read_catalogs(sessions.connections[node], node, *where)

    primaries = list(sessions.primaries)
    found = dict(zip(primaries, in_parallel(read, primaries), strict=True))
    tables = {node: one.tables for node, one in found.items()}
    check_admissible(tables)
    return number_groups(tables, PARTITION_ROWS), found


def plan_schema(
    sessions: Sessions,
    known: Known,
    where: tuple[str, GroupRules],
    archived: Mapping[str, Iterable[Version]],
    moved: Mapping[str, set[int]],
) -> SchemaPlan:
    """Ask every primary and compare with what is `known`; `where` are the fleet's id and the rules of the groups.

    `archived` are the definitions in segments that no commit lists, by shard; `moved` the oids of tables that were
    changed under definitions that nobody knows. Raises what refuses a table: TableNotAdmissibleError,
    PublicationChangedError.
    """
    tables, found = read_all(sessions, where)
    tried = {shard: [_tried(version) for version in archived.get(shard, ())] for shard in found}
    highest = max([known.highest, *(one.group.number for ones in tried.values() for one in ones)])
    shards: dict[str, ShardPlan] = {}
    for shard, one in found.items():
        now = (tables[shard], one.states)
        shards[shard] = plan_shard(shard, known.before(shard), tried[shard], now, highest, moved.get(shard, ()))
        highest = max([highest, *(group.number for group in shards[shard].groups)])
    fingerprints = {shard: one.fingerprint for shard, one in found.items()}
    return SchemaPlan(shards, fingerprints)


def _tried(version: Version) -> Before:
    return Before(version.oid, version.group, is_copied=version.copied_from is not None)


def tell(plan: SchemaPlan, progress: Progress) -> None:
    """Say which tables have changed, and what becomes of them."""
    for shard, found in plan.shards.items():
        for one in found.changed:
            what = f"is copied anew: {one.reason}" if one.after is None else "has a new definition"
            progress.note(f"node {shard}: table {one.table.group.name} {what}")


def publish_new(
    sessions: Sessions,
    names: Mapping[str, list[str]],
    where: tuple[str, GroupRules],
    wait_seconds: float,
    progress: Progress,
) -> None:
    """Let the tables of these names, by shard, be followed; raise RelationLockedError if one stays locked."""

    def publish(node: str) -> None:
        connection = sessions.connections[node]
        seconds, tables = max(wait_seconds, LOCK_SECONDS_MIN), list[Table]()
        try:
            with answering(sessions.fleet.node(node)), connection.transaction():
                bound_lock_waits(connection, seconds)
                tables = read_tables(connection, where[1])
                ensure_publications(connection, where[0], tables)
        except psycopg.errors.LockNotAvailable as error:
            chosen = [qualified(table.group) for table in tables if table.group.name in names[node]]
            what = "publishing new tables"
            raise locked_error(sessions.fleet.node(node), what, chosen, seconds, modes=PUBLISHING) from error
        progress.note(f"node {node}: new tables are followed: {', '.join(names[node])}")

    in_parallel(publish, names)


def check_unchanged(sessions: Sessions, plan: SchemaPlan, where: tuple[str, GroupRules]) -> str:
    """What was changed on a primary since the plan was made, "" if nothing was."""

    def changed(node: str) -> str:
        with answering(sessions.fleet.node(node)):
            connection = sessions.connections[node]
            if read_fingerprint(connection) != plan.fingerprints[node]:
                return f"node {node}: its schema was changed"
            tables = read_tables(connection, where[1])
            states = read_table_states(connection, node, where[0], tables)
        for name, was in plan.shards[node].states.items():
            now = states.get(name)
            if now is None or (now.oid, now.publication, now.membership) != (was.oid, was.publication, was.membership):
                return f"node {node}: table {name} was published otherwise"
        return ""

    return next(filter(None, in_parallel(changed, sessions.primaries)), "")
