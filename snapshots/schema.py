"""What a shard has besides rows: its DDL, the roles that the DDL names, and its sequences."""

from __future__ import annotations

import secrets
from typing import Any

import psycopg
import zstandard
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.postgres_wheel import run_tool
from fleet.watch import Watch
from snapshots.manifest import Sequence, StoredObject
from storage.digest import digest
from storage.errors import RefusedError
from storage.store import ObjectStore

SECTIONS = ("pre-data", "post-data")
DUMP_SECONDS_MAX = 3600
# Owners and grantees; the bootstrap superuser is pinned, so only ownership tells of it.
ROLES_QUERY = """
SELECT r.rolname FROM pg_shdepend d JOIN pg_roles r ON r.oid = d.refobjid
 WHERE d.refclassid = 'pg_authid'::regclass
   AND d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION
SELECT pg_get_userbyid(c.relowner) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
ORDER BY 1
"""
SEQUENCES_QUERY = """
SELECT n.nspname, c.relname, pg_sequence_last_value(c.oid), has_sequence_privilege(c.oid, 'SELECT')
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence = 'p' AND n.nspname !~ '^pg_'
 ORDER BY 1, 2
"""


class SchemaDumpError(RefusedError):
    """The DDL of a database can't be had."""


def dump_section(node: Node, section: str, exported: str, watch: Watch) -> str:
    """The DDL of `section` as plain SQL, as the exported snapshot shows it; ended when `watch` finds a node silent.

    The guards that psql's restrict mode needs, and no server understands, are left out.
    """
    guard = secrets.token_hex(16)
    # pg_dump refuses what its own session settings need; ours only matter for values.
    dsn = make_conninfo("", **{k: v for k, v in conninfo_to_dict(node.dsn).items() if v is not None})
    completed = run_tool(
        "pg_dump", "--dbname", dsn, f"--section={section}", "--schema-only", "--no-subscriptions",
        f"--snapshot={exported}", "--quote-all-identifiers", f"--restrict-key={guard}",
        seconds_max=DUMP_SECONDS_MAX, ended_by=watch.on_silence,
    )  # fmt: skip
    lines = completed.stdout.split("\n")
    return "\n".join(line for line in lines if line not in (f"\\restrict {guard}", f"\\unrestrict {guard}"))


def store_schema(store: ObjectStore, node: Node, prefix: str, exported: str, watch: Watch) -> list[StoredObject]:
    """Dump both sections of a shard and store them, compressed with zstd."""
    stored: list[StoredObject] = []
    for section in SECTIONS:
        body = zstandard.compress(dump_section(node, section, exported, watch).encode())
        key = f"{prefix}/{section}.sql.zst"
        store.create(key, body)
        stored.append(StoredObject(key, section, node.id, len(body), digest(body)))
    return stored


def schema_prefix(snapshot: str, node: str, operation: str) -> str:
    """The folder of one shard's DDL, of one attempt to make it."""
    return f"snapshots/{snapshot}/schema/{node}/{operation}"


def read_schema(body: bytes) -> str:
    """The SQL of a stored section."""
    return zstandard.decompress(body).decode()


def read_roles(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """The roles that the database's DDL names."""
    return tuple(row[0] for row in connection.execute(ROLES_QUERY))


def read_sequences(connection: psycopg.Connection[Any]) -> tuple[Sequence, ...]:
    """Every sequence of the database with its value, None where it was never used."""
    found = connection.execute(SEQUENCES_QUERY).fetchall()
    unreadable = [f"{schema}.{name}" for schema, name, _, readable in found if not readable]
    if unreadable:
        raise SchemaDumpError(
            f"role {connection.info.user} may not read {', '.join(unreadable)}",
            hint="GRANT pg_read_all_data TO the role",
        )
    return tuple(Sequence(schema, name, value) for schema, name, value, _ in found)
