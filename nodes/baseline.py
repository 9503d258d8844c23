"""The baseline: the identities of all nodes, so that a chain is never continued on a different node.

A full snapshot stores the baseline in its commit, and every increment first compares the nodes with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Count, Record, fields_of
from cutline.nodes.clocks import ClockReading, time_of_epoch
from cutline.nodes.encodings import DATABASE_NAME
from cutline.storage.clock import machine_now
from cutline.storage.errors import ChainEnd, RefusedError

if TYPE_CHECKING:
    import psycopg

LIBC, ICU, BUILTIN = "c", "i", "b"
STANDBY_DECODING_VERSION = 160000
SERVER_VERSION_MIN = 150000

IDENTITY_QUERY = f"""
SELECT (pg_control_system()).system_identifier::text,
       -- The control file gets a new timeline only with the next checkpoint, which may take minutes.
       CASE WHEN pg_is_in_recovery()
            THEN greatest((pg_control_checkpoint()).timeline_id, (pg_control_recovery()).min_recovery_end_timeline,
                          (SELECT received_tli FROM pg_stat_wal_receiver))
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int
       END,
       d.oid::bigint,
       -- The database's encoding may not have its name, which create refuses (nodes/preconditions.py).
       {DATABASE_NAME},
       current_setting('server_version_num')::int,
       pg_encoding_to_char(d.encoding),
       d.datcollate,
       d.datctype,
       pg_is_in_recovery(),
       d.datlocprovider::text,
       -- 17 renamed this column; 15 has no ICU rules.
       coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale'),
       to_jsonb(d) ->> 'daticurules',
       extract(epoch FROM pg_postmaster_start_time())::text || ':' || current_setting('port'),
       extract(epoch FROM clock_timestamp())::float8
  FROM pg_database d WHERE d.datname = current_database()
"""

# The most informative reason comes first: for example, an upgrade also changes the system identifier.
CHANGE_REASONS = {
    "backup_of": "fleet.toml gives the node a different role",
    "database": "the dsn in fleet.toml names a different database",
    "server_version": "the server was upgraded",
    "system_identifier": "its dsn points to a different server",
    "timeline": "a standby was promoted, or the server was restored to a point in time",
    "database_oid": "the database was dropped and created again, or a restore replaced it",
}

# The properties that say which server and database it is.
IDENTIFYING = ("database", "server_version", "system_identifier", "database_oid")


class BaselineChangedError(RefusedError):
    """A node's identity differs from the one that the full snapshot recorded."""


class FleetTopologyError(RefusedError):
    """A node's role, primary or standby, differs from its role in fleet.toml."""


class NodeIdentity(Record, frozen=True):
    """The identity of one node, as stored in a commit's baseline.

    `collate` and `ctype` are the libc locales; `locale` is the locale of the ICU or builtin provider.
    """

    node: str
    backup_of: str | None
    system_identifier: str
    timeline: Count
    database_oid: Count
    database: str
    server_version: Count
    encoding: str
    collate: str
    ctype: str
    in_recovery: bool
    locale_provider: str = LIBC
    locale: str | None = None
    icu_rules: str | None = None

    @property
    def place(self) -> str:
        """The database as `system identifier/oid`, which its renaming or another id in fleet.toml does not change."""
        return f"{self.system_identifier}/{self.database_oid}"


class FoundNode(Struct, frozen=True):
    """A running node's answer. `process` identifies its server process by start time and port."""

    identity: NodeIdentity
    process: str
    clock: ClockReading

    def is_server_of(self, other: FoundNode) -> bool:
        """Whether both answers came from the same server process."""
        return (self.process, self.identity.system_identifier) == (other.process, other.identity.system_identifier)


def find_node(node: Node, connection: psycopg.Connection[Any]) -> FoundNode:
    """Read the identity of `node`."""
    asked_at = machine_now()
    row = connection.execute(IDENTITY_QUERY).fetchone()
    if row is None:
        raise RuntimeError("pg_database has no row for the current database")
    *identity, process, seconds = row
    clock = ClockReading(node.id, time_of_epoch(seconds), asked_at, machine_now())
    return FoundNode(NodeIdentity(node.id, node.backup_of, *identity), process, clock)


def can_decode(identity: NodeIdentity) -> bool:
    """Whether the node can decode its WAL; standbys can as of PostgreSQL 16."""
    return not identity.in_recovery or identity.server_version >= STANDBY_DECODING_VERSION


def check_topology(nodes: Iterable[Node], nodes_found: Mapping[str, FoundNode]) -> None:
    """Raise FleetTopologyError unless every node is a separate server in the role that fleet.toml gives it."""
    seen: dict[str, str] = {}
    identities = {name: found_node.identity for name, found_node in nodes_found.items()}
    for node in nodes:
        found_node = nodes_found[node.id]
        server = f"{found_node.identity.system_identifier} {found_node.process}"
        if server in seen:
            raise FleetTopologyError(
                f"nodes {seen[server]} and {node.id} are the same server",
                hint="give each node in fleet.toml a server of its own",
                details={"nodes": [seen[server], node.id]},
            )
        seen[server] = node.id
        _check_role(node, found_node.identity, identities)


def two_primaries_error(node: Node) -> FleetTopologyError:
    """Return the error for a standby in fleet.toml that accepts writes, as its primary does."""
    return FleetTopologyError(
        f"node {node.id} is not a standby, but fleet.toml says backup_of = {node.backup_of}: both accept writes",
        hint="find out which of the two servers the applications use; stop the other, and make it a standby again"
        f" (pg_rewind, pg_basebackup). If {node.id} is a server of its own now, remove it from fleet.toml",
        details={"node": node.id},
    )


def two_hosts_error(node: Node, hosts: Sequence[str]) -> FleetTopologyError:
    """Return the error for a node whose dsn names several hosts of which more than one accepts writes."""
    return FleetTopologyError(
        f"node {node.id}: {' and '.join(hosts)} accept writes, but its dsn names them as the servers of one shard",
        hint="find out which of these servers the applications use; stop the others, and make them standbys again"
        " (pg_rewind, pg_basebackup)",
        details={"node": node.id, "hosts": list(hosts)},
    )


def _check_role(node: Node, identity: NodeIdentity, identities: Mapping[str, NodeIdentity]) -> None:
    problem, hint = "", "correct the node's dsn or backup_of in fleet.toml"
    if node.backup_of is None and identity.in_recovery:
        problem = f"node {node.id} is a standby, but fleet.toml lists it as a primary"
    elif node.backup_of is not None:
        primary = identities[node.backup_of]
        if not identity.in_recovery:
            raise two_primaries_error(node)
        if identity.system_identifier != primary.system_identifier:
            problem = f"node {node.id} is a standby of a different primary, not of {node.backup_of}"
        elif identity.database_oid != primary.database_oid:
            problem = (
                f"node {node.id}: its database {identity.database} is not a copy of {node.backup_of}'s: its oid is"
                f" {identity.database_oid}, but {primary.database_oid} on the primary"
            )
            hint = (
                f"compare the dbname of both dsns in fleet.toml; {node.backup_of}'s leads to database"
                f" {primary.database}. If both are right, wait until the standby has caught up with its primary"
            )
    if not problem and identity.server_version < SERVER_VERSION_MIN:
        problem = f"node {node.id}: PostgreSQL {identity.server_version // 10000} is older than 15"
        hint = "upgrade the server, or remove the node from fleet.toml"
    if problem:
        raise FleetTopologyError(problem, hint=hint, details={"node": node.id})


def check_presence(was: Mapping[str, NodeIdentity], fleet: Fleet) -> tuple[Node, ...]:
    """Without contacting any node, return the nodes in fleet.toml of which the chain has copies.

    Standbys may have been added or removed since, and shards added. Raises BaselineChangedError if a primary was
    removed whose shard fleet.toml does not list as retired, or if a node's role in fleet.toml has changed.
    """
    listed = {node.id: node for node in fleet.nodes}
    primaries = {node for node, identity in was.items() if identity.backup_of is None}
    for node in sorted(primaries | (was.keys() & listed.keys())):
        if node not in listed:
            if node in fleet.retired:
                continue
            raise BaselineChangedError(
                f"node {node}: it is a shard of the chain, but not in fleet.toml",
                hint="list it again in fleet.toml; or, if it has left the fleet for good, write before the file's first"
                f' table: retired = ["{node}"]',
                details={"node": node, "property": "presence"},
            )
        if was[node].backup_of != listed[node].backup_of:
            error = _changed_error(was[node], "backup_of", was[node].backup_of, listed[node].backup_of)
            raise BaselineChangedError(
                error.message,
                hint="put its backup_of back in fleet.toml; if ids were exchanged, give these nodes ids that the chain"
                f" does not have; or {NEW_CHAIN}",
                ends_chain=ChainEnd.PERHAPS,
                details=error.details,
            )
    return tuple(node for node in fleet.nodes if node.id in was)


def check_baseline(was: Mapping[str, NodeIdentity], now: Mapping[str, NodeIdentity]) -> None:
    """Raise BaselineChangedError naming the first node and property that differ; `was` and `now` have the same keys."""
    for node in sorted(was):
        before, after = fields_of(was[node]), fields_of(now[node])
        for name in (*CHANGE_REASONS, *(name for name in before if name not in CHANGE_REASONS)):
            if before[name] != after[name] and not (name == "server_version" and _same_major(was[node], now[node])):
                raise _changed_error(was[node], name, before[name], after[name])


def why_replaced(was: NodeIdentity, now: NodeIdentity, *, is_expected: bool = False) -> str:
    """Return the reason for copying the database again: it is not the database that the chain has a copy of.

    Returns "" if it is the same database. Also returns "" if that is uncertain; check_baseline then reports the
    difference. If `is_expected`, any other server is accepted as a replacement.
    """
    before, after = (one.server_version // 10000 for one in (was, now))
    if was.system_identifier == now.system_identifier:
        if was.database_oid == now.database_oid:
            return ""
        if was.database == now.database:
            return f"database {now.database} was dropped and created again, or a restore replaced it"
    elif before < after and (was.database, was.database_oid) == (now.database, now.database_oid):
        return f"its server was upgraded from PostgreSQL {before} to {after}"
    return "its server or database was replaced by another, as --replaced says" if is_expected else ""


def _same_major(was: NodeIdentity, now: NodeIdentity) -> bool:
    return was.server_version // 10000 == now.server_version // 10000


def _changed_error(identity: NodeIdentity, name: str, was: object, now: object) -> BaselineChangedError:
    node, shard = identity.node, identity.backup_of or identity.node
    what, why = name.replace("_", " "), f": {CHANGE_REASONS[name]}" if name in CHANGE_REASONS else ""
    # "backup_of" describes the node itself; all other names refer to its properties.
    subject = "it" if name == "backup_of" else f"its {what}"
    texts = [_value_text(name, value) for value in (was, now)]
    problem = f"node {node}: {subject} was {texts[0]} at the full snapshot and is now {texts[1]}{why}"
    details: dict[str, object] = {"node": node, "property": what, "was": str(was), "now": str(now)}
    if name not in IDENTIFYING:
        return BaselineChangedError(problem, hint=NEW_CHAIN, ends_chain=ChainEnd.FOR_GOOD, details=details)
    return BaselineChangedError(
        problem,
        hint=[
            "correct its dsn in fleet.toml; or, if another server or database has taken its place for good, copy it"
            f" again: snapshot create NAME --incremental --replaced {shard}",
            f"or {NEW_CHAIN}",
        ],
        ends_chain=ChainEnd.PERHAPS,
        details=details,
    )


def _value_text(name: str, value: object) -> str:
    if name == "server_version":
        return f"{int(str(value)) // 10000}.{int(str(value)) % 10000}"
    if name == "backup_of":
        return f"a standby of {value}" if value else "a primary"
    return str(value)
