"""The baseline: what identifies every node, so that a chain is never continued on another one.

Read at the full snapshot, stored in its commit, and compared before every increment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fleet.config import Node
from storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

LIBC, ICU, BUILTIN = "c", "i", "b"
STANDBY_DECODING_VERSION = 160000
SERVER_VERSION_MIN = 150000

IDENTITY_QUERY = """
SELECT (pg_control_system()).system_identifier::text,
       (pg_control_checkpoint()).timeline_id,
       d.oid::bigint,
       d.datname,
       current_setting('server_version_num')::int,
       pg_encoding_to_char(d.encoding),
       d.datcollate,
       d.datctype,
       pg_is_in_recovery(),
       extract(epoch FROM pg_postmaster_start_time())::text || ':' || current_setting('port'),
       d.datlocprovider::text,
       -- 17 has another name for this column than 15 and 16, and 15 lacks the rules.
       coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale'),
       to_jsonb(d) ->> 'daticurules'
  FROM pg_database d WHERE d.datname = current_database()
"""


class BaselineChangedError(RefusedError):
    """A node is not the one the full snapshot was taken from."""


class FleetTopologyError(RefusedError):
    """The nodes are not the primaries and standbys that fleet.toml says they are."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """What one node is. `process` names the running server and is not part of the baseline.

    `collate` and `ctype` are libc's locales, `locale` the one of another provider.
    """

    node: str
    backup_of: str | None
    system_identifier: str
    timeline: int
    database_oid: int
    database: str
    server_version: int
    encoding: str
    collate: str
    ctype: str
    in_recovery: bool
    process: str = ""
    locale_provider: str = LIBC
    locale: str | None = None
    icu_rules: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The baseline's entry for this node in a commit."""
        return {key: value for key, value in asdict(self).items() if key != "process"}


def identity_from_json(entry: dict[str, Any]) -> NodeIdentity:
    """Read what `NodeIdentity.to_json` wrote."""
    return NodeIdentity(**entry)


def read_identity(node: Node, connection: psycopg.Connection[Any]) -> NodeIdentity:
    """Ask `node` what it is."""
    row = connection.execute(IDENTITY_QUERY).fetchone()
    if row is None:
        raise RuntimeError("pg_database has no row for the current database")
    return NodeIdentity(node.id, node.backup_of, *row)


def check_topology(nodes: Iterable[Node], identities: Mapping[str, NodeIdentity]) -> None:
    """Raise FleetTopologyError unless every one of `nodes` plays the part that fleet.toml gives it."""
    seen: dict[str, str] = {}
    for node in nodes:
        found = identities[node.id]
        server = f"{found.system_identifier} {found.process}"
        if server in seen:
            raise FleetTopologyError(
                f"nodes {seen[server]} and {node.id} are one server",
                hint="give every node in fleet.toml a server of its own",
                details={"nodes": [seen[server], node.id]},
            )
        seen[server] = node.id
        _check_part(node, found, identities)


def _check_part(node: Node, found: NodeIdentity, identities: Mapping[str, NodeIdentity]) -> None:
    problem = ""
    if node.backup_of is None and found.in_recovery:
        problem = f"node {node.id} is a standby, and fleet.toml calls it a primary"
    elif node.backup_of is not None:
        primary = identities[node.backup_of]
        if not found.in_recovery:
            problem = f"node {node.id} is no standby, and fleet.toml calls it a backup of {node.backup_of}"
        elif (found.system_identifier, found.database_oid) != (
            primary.system_identifier,
            primary.database_oid,
        ):
            problem = f"node {node.id} is a standby of another primary than {node.backup_of}"
        elif found.server_version < STANDBY_DECODING_VERSION:
            problem = f"node {node.id}: a standby below PostgreSQL 16 can't decode its WAL"
    if not problem and found.server_version < SERVER_VERSION_MIN:
        problem = f"node {node.id}: PostgreSQL {found.server_version // 10000} is older than 15"
    if problem:
        raise FleetTopologyError(
            problem, hint="correct the node's dsn or backup_of in fleet.toml", details={"node": node.id}
        )


def check_baseline(was: Mapping[str, NodeIdentity], now: Mapping[str, NodeIdentity]) -> None:
    """Raise BaselineChangedError naming the first node and property that differ."""
    for node in sorted(was.keys() | now.keys()):
        if node not in now:
            _changed(node, "presence", "part of the fleet", "absent from fleet.toml")
        if node not in was:
            _changed(node, "presence", "absent", "in fleet.toml")
        before, after = was[node].to_json(), now[node].to_json()
        for name, value in before.items():
            if after[name] != value and not (name == "server_version" and value // 10000 == after[name] // 10000):
                _changed(node, name.replace("_", " "), value, after[name])


def _changed(node: str, what: str, was: object, now: object) -> None:
    raise BaselineChangedError(
        f"node {node}: its {what} was {was} at the full snapshot and is {now}",
        hint="take a new full snapshot: snapshot create NAME",
        details={"node": node, "property": what, "was": str(was), "now": str(now)},
    )
