"""Dump the DDL of a shard, read it back, and list the roles that it names.

What is stored is pg_dump's own archive: pg_restore restores it, also without Cutline. Two things are added before its
entries: what the database does not have although every new one does, and its search_path.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import zstandard

from cutline.fleet.config import Node
from cutline.fleet.hints import NEW_CHAIN
from cutline.fleet.nodes.connections import as_connected, connect, program_connection, raising_unreachable
from cutline.fleet.nodes.encodings import RAW
from cutline.fleet.nodes.relation_locks import LockWatch, locked_error
from cutline.fleet.nodes.session_kinds import check_dump_settings
from cutline.fleet.nodes.watch import Watch
from cutline.fleet.programs.clients import programs_for
from cutline.fleet.programs.wheel import ProgramFailedError, run_tool
from cutline.snapshots.ddl.archive import DumpFormatError, NewEntry, read_contents, rewrite
from cutline.snapshots.ddl.dump_faults import read_dump_faults
from cutline.snapshots.ddl.search_path import read_search_path
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.compressed import decompress
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.stored_object import DDL, StoredObject
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.storage.store import ObjectStore, stoppable_requests
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

DUMP_SECONDS_MAX = 3600
# The archive of 10,000 tables has 10 MB.
DDL_BYTES_MAX = 512 << 20
UNKNOWN_SIZE = -1
# The kinds of the entries that are added to pg_dump's.
DROP, PATH_ENTRY = "DROP", "SEARCH PATH"
# Owners and grantees. pg_shdepend does not list the bootstrap superuser (it is pinned), so its objects are looked up.
ROLES_QUERY = """
SELECT r.rolname FROM pg_shdepend d JOIN pg_roles r ON r.oid = d.refobjid
 WHERE d.refclassid = 'pg_authid'::regclass
   AND d.dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION
SELECT pg_get_userbyid(10) WHERE EXISTS (
       SELECT FROM (SELECT oid, relowner FROM pg_class UNION ALL SELECT oid, proowner FROM pg_proc
                    UNION ALL SELECT oid, typowner FROM pg_type UNION ALL SELECT oid, nspowner FROM pg_namespace
                    UNION ALL SELECT oid, oprowner FROM pg_operator UNION ALL SELECT oid, opcowner FROM pg_opclass
                    UNION ALL SELECT oid, opfowner FROM pg_opfamily UNION ALL SELECT oid, collowner FROM pg_collation
                    UNION ALL SELECT oid, conowner FROM pg_conversion UNION ALL SELECT oid, lanowner FROM pg_language
                    UNION ALL SELECT oid, evtowner FROM pg_event_trigger UNION ALL SELECT oid, pubowner
                      FROM pg_publication UNION ALL SELECT oid, fdwowner FROM pg_foreign_data_wrapper
                    UNION ALL SELECT oid, srvowner FROM pg_foreign_server UNION ALL SELECT oid, umuser
                      FROM pg_user_mappings AS m (oid, srvid, srvname, umuser, usename, umoptions)
                    UNION ALL SELECT oid, stxowner FROM pg_statistic_ext UNION ALL SELECT oid, dictowner
                      FROM pg_ts_dict UNION ALL SELECT oid, cfgowner FROM pg_ts_config
                    UNION ALL SELECT oid, defaclrole FROM pg_default_acl) AS owned (oid, owner)
        WHERE oid >= 16384 AND owner = 10)
ORDER BY 1
"""
# Objects that every new database has: pg_dump does not write that they were dropped.
DROPPED_QUERY = """
SELECT 'SCHEMA public', 'DROP SCHEMA "public";' WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'public')
UNION ALL
SELECT 'EXTENSION plpgsql', 'DROP EXTENSION "plpgsql";'
 WHERE NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'plpgsql')
"""


class ArchiveUnknownError(RefusedError):
    """pg_dump wrote an archive of a version that Cutline can't read."""


def dump_archive(node: Node, exported: str | None, watch: Watch) -> bytes:
    """Dump a database's DDL as an archive of pg_dump, without pg_dump's faults.

    The dump shows the snapshot `exported`, or the current state if that is None. It is ended if `watch` finds a node
    silent. Raises RelationLockedError if a table or view stays locked, ArchiveUnknownError.
    """
    application = f"cutline pg_dump {secrets.token_hex(4)}"
    with raising_unreachable(node), connect(node) as connection, TemporaryDirectory(prefix="cutline-ddl-") as folder:
        check_dump_settings(node, connection)
        needs_tls = bool(connection.pgconn.ssl_in_use)
        access = program_connection(as_connected(node, connection), needs_tls=needs_tls, application_name=application)
        path, programs = Path(folder) / "archive", programs_for(node, connection)
        locks = LockWatch(connection, application)

        @contextmanager
        def ending(act: Callable[[], None]) -> Iterator[None]:
            with watch.on_silence(act), locks.ending(act):
                yield

        try:
            run_tool(
                # Constants in the DDL depend on the session's settings, so the dump uses ours, as the restore does.
                "pg_dump", "--dbname", access.conninfo, "--format=custom",
                "--compress=0", "--no-sync", "--no-password",
                # Not --schema-only, which omits the refresh of materialized views. Not --lock-wait-timeout, which
                # bounds the locks of tables alone: LockWatch bounds all.
                "--section=pre-data", "--section=post-data",
                "--no-large-objects" if programs.has("--no-large-objects") else "--no-blobs",
                *(["--no-statistics"] if programs.has("--no-statistics") else []),
                "--no-subscriptions", "--quote-all-identifiers", f"--encoding={RAW}", f"--file={path}",
                *([f"--snapshot={exported}"] if exported else []),
                seconds_max=DUMP_SECONDS_MAX, environment=access.environment, folder=programs.folder,
                ended_by=ending,
            )  # fmt: skip
        except ProgramFailedError as error:
            if not locks.found:
                raise
            raise locked_error(node, "reading the DDL", locks.found) from error
        first = [NewEntry(DROP, name, f"{statement}\n") for name, statement in connection.execute(DROPPED_QUERY)]
        if (search_path := read_search_path(connection)) is not None:
            first.append(NewEntry(PATH_ENTRY, search_path))
        body, faults = path.read_bytes(), read_dump_faults(connection)
    try:
        contents = read_contents(body)
    except DumpFormatError as error:
        raise ArchiveUnknownError(
            f"node {node.id}: the archive of {programs.folder}/pg_dump can't be read: {error}",
            hint="use pg_dump of a version that this version of Cutline knows: [tools] postgresql in fleet.toml",
            details={"node": node.id},
        ) from error
    return rewrite(body, contents, faults.correct(body, contents), first)


def store_ddl(store: ObjectStore, node: Node, prefix: str, exported: str | None, watch: Watch) -> list[StoredObject]:
    """Dump a shard's DDL and store its archive, compressed with zstd. Ends as `dump_archive` does."""
    body = zstandard.compress(dump_archive(node, exported, watch))
    key = f"{prefix}/{DDL}-{secrets.token_hex(4)}.dump.zst"
    with stoppable_requests() as stop, watch.on_silence(stop):
        digest = create_or_find(store, key, body)
    return [StoredObject(key, DDL, node.id, len(body), digest, {})]


def find_ddl(chain: Chain, shard: str) -> StoredObject:
    """The archive of the shard's DDL; raise ManifestError if no commit lists it."""
    if (stored := chain.ddl_object(shard)) is not None:
        return stored
    raise ManifestError(
        f"snapshot {chain.name} lists no DDL of shard {shard}",
        hint=f"it can't be restored; {NEW_CHAIN}",
        ends_chain=ChainEnd.PERHAPS,
        details={"node": shard},
    )


def read_ddl(body: bytes, stored: StoredObject) -> bytes:
    """A stored archive as it was before it was compressed; raise ObjectDamagedError if it can't be read.

    The caller has verified that `body` is the committed object.
    """
    try:
        ddl = decompress(body, DDL_BYTES_MAX)
        if zstandard.frame_content_size(body) not in (UNKNOWN_SIZE, len(ddl)):
            raise ValueError("it ends early")
        read_contents(ddl)
    except (zstandard.ZstdError, ValueError) as error:
        detail = f"it can't be read as DDL: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error
    return ddl


def read_stored_ddl(store: ObjectStore, chain: Chain, shard: str) -> bytes:
    """The archive of a shard's DDL; raise ObjectDamagedError, ManifestError."""
    stored = find_ddl(chain, shard)
    return read_ddl(read_listed(store, shard, stored.key, (stored.size, stored.digest)), stored)


def read_roles(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """The roles that the database's DDL names."""
    return tuple(row[0] for row in connection.execute(ROLES_QUERY))
