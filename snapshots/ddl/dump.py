"""What a shard has besides rows: its DDL, and the roles that the DDL names.

The DDL is stored in sections, in the order in which a restore runs them: what is there before the rows, what comes
after them, what fills materialized views, and event triggers, which must see none of that.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import zstandard

from fleet.config import Node
from fleet.hints import NEW_CHAIN
from fleet.nodes.connections import connect, conninfo, raising_unreachable
from fleet.nodes.encodings import RAW, raw_bytes, raw_text
from fleet.nodes.relation_locks import LockWatch, locked_error
from fleet.nodes.watch import Watch
from fleet.programs.wheel import ProgramFailedError, run_tool
from snapshots.ddl.dump_faults import correct_script, read_other_types, restore_types
from snapshots.ddl.fingerprint import OWN_PUBLICATION
from snapshots.ddl.search_path import read_search_path
from snapshots.records.chain import Chain
from snapshots.records.commit import DDL, StoredObject
from snapshots.records.documents import ManifestError
from storage.digest import digest
from storage.store import ObjectStore
from storage.storing import create_or_find
from wal.segments.damage import ObjectDamagedError

SECTIONS = PRE_DATA, POST_DATA, REFRESH, EVENT_TRIGGERS = DDL
DUMP_SECONDS_MAX = 3600
# A line of pg_restore's list: the entry's number, its catalog's oid and its own, what it is, its schema and name.
ENTRY = re.compile(r"^(?P<number>\d+); \d+ \d+ (?P<what>.*)$", re.MULTILINE)
# Of both sections that pg_dump knows, what belongs to one of ours, and what to none: a note on Cutline's own
# publication says how its node was before it was made read-only, and a restored one is not.
OF_EVENT_TRIGGER = re.compile(r"(?:(?:COMMENT|SECURITY LABEL) - )?EVENT TRIGGER ")
OF_REFRESH = re.compile(r"MATERIALIZED VIEW DATA ")
OF_NONE = re.compile(rf'COMMENT - PUBLICATION "?{OWN_PUBLICATION}"? ')
# Owners and grantees. The bootstrap superuser is pinned, so what belongs to it is asked of the objects themselves.
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
# What every new database has: pg_dump has no word for it where it was dropped.
DROPPED_QUERY = """
SELECT 'DROP SCHEMA "public";' WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'public')
UNION ALL
SELECT 'DROP EXTENSION "plpgsql";' WHERE NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'plpgsql')
"""


def dump_sections(node: Node, exported: str | None, watch: Watch) -> dict[str, str]:
    """The DDL of a database as plain SQL by section, raw text (fleet.nodes.encodings).

    Literals and comments may hold any bytes of the database's encoding.
    As the exported snapshot shows it, or as it is now. Ended when `watch` finds a node silent; raises
    RelationLockedError where a table or view stays locked.
    """
    application = f"cutline pg_dump {secrets.token_hex(4)}"
    with raising_unreachable(node), connect(node) as connection, TemporaryDirectory(prefix="cutline-ddl-") as folder:
        archive = Path(folder) / "archive"
        locks = LockWatch(connection, application)

        @contextmanager
        def ending(act: Callable[[], None]) -> Iterator[None]:
            with watch.on_silence(act), locks.ending(act):
                yield

        try:
            run_tool(
                # Texts in the DDL are constants of the session's settings too, and it is loaded by a session with ours.
                "pg_dump", "--dbname", conninfo(node.dsn, application_name=application), "--format=custom",
                "--compress=none", "--no-sync",
                # Not --schema-only, which leaves out what fills materialized views. A bound of its own for locks,
                # --lock-wait-timeout, is for tables alone.
                "--section=pre-data", "--section=post-data", "--no-large-objects", "--no-statistics",
                "--no-subscriptions", "--quote-all-identifiers", f"--encoding={RAW}", f"--file={archive}",
                *([f"--snapshot={exported}"] if exported else []),
                seconds_max=DUMP_SECONDS_MAX, ended_by=ending,
            )  # fmt: skip
        except ProgramFailedError as error:
            if not locks.found:
                raise
            raise locked_error(node, "reading the DDL", locks.found) from error
        found = _sections_of(archive)
        dropped = "".join(f"{statement}\n" for (statement,) in connection.execute(DROPPED_QUERY))
        pre_data = restore_types(found[PRE_DATA], read_other_types(connection))
        return found | {PRE_DATA: read_search_path(connection) + dropped + pre_data}


def _sections_of(archive: Path) -> dict[str, str]:
    """pg_dump's archive as the SQL of each section."""
    listed = run_tool("pg_restore", "--list", str(archive)).stdout
    entries = [(entry["number"], _section_of(entry["what"])) for entry in ENTRY.finditer(listed)]
    found: dict[str, str] = {}
    for section in SECTIONS:
        # Before and after the rows is for the archive to say.
        chosen = [number for number, own in entries if own == (section if section in (REFRESH, EVENT_TRIGGERS) else "")]
        found[section] = _script(archive, section, chosen) if chosen else ""
    return found


def _section_of(what: str) -> str | None:
    """REFRESH or EVENT_TRIGGERS; "" for all that the archive knows a place for; None for what is left out."""
    for section, pattern in ((EVENT_TRIGGERS, OF_EVENT_TRIGGER), (REFRESH, OF_REFRESH), (None, OF_NONE)):
        if pattern.match(what):
            return section
    return ""


def _script(archive: Path, section: str, entries: list[str]) -> str:
    """The SQL of the archive's entries, in the archive's order.

    It is raw text (fleet.nodes.encodings): literals and comments may hold any bytes of the database's encoding.
    The guards that psql's restrict mode needs, and no server understands, are left out.
    """
    guard = secrets.token_hex(16)
    chosen, script = archive.with_name("entries"), archive.with_name("script")
    chosen.write_text("".join(f"{number};\n" for number in entries))
    run_tool(
        "pg_restore", f"--use-list={chosen}", f"--file={script}", f"--restrict-key={guard}",
        *([f"--section={section}"] if section in (PRE_DATA, POST_DATA) else []), str(archive),
    )  # fmt: skip
    lines = raw_text(script.read_bytes()).split("\n")
    return correct_script(
        "\n".join(line for line in lines if line not in (f"\\restrict {guard}", f"\\unrestrict {guard}"))
    )


def store_schema(store: ObjectStore, node: Node, prefix: str, exported: str | None, watch: Watch) -> list[StoredObject]:
    """Dump a shard's DDL and store its sections, compressed with zstd."""
    stored: list[StoredObject] = []
    for section, script in dump_sections(node, exported, watch).items():
        body = zstandard.compress(raw_bytes(script))
        key = f"{prefix}/{section}-{secrets.token_hex(4)}.sql.zst"
        create_or_find(store, key, body)
        stored.append(StoredObject(key, section, node.id, len(body), digest(body)))
    return stored


def find_schema_object(chain: Chain, shard: str) -> tuple[StoredObject, ...]:
    """The objects of the shard's DDL, a section after the other; raise ManifestError where one is not listed."""
    found = {stored.kind: stored for stored in chain.schema_objects(shard)}
    if lacking := [section for section in SECTIONS if section not in found]:
        raise ManifestError(
            f"the snapshot lists no {' and no '.join(lacking)} DDL of shard {shard}",
            hint=f"it can't be restored; {NEW_CHAIN}",
            details={"node": shard},
        )
    return tuple(found[section] for section in SECTIONS)


def read_schema(body: bytes, stored: StoredObject) -> str:
    """The SQL of a stored section, as raw text, whose bytes are those that were committed; raise ObjectDamagedError."""
    try:
        return raw_text(zstandard.decompress(body))
    except zstandard.ZstdError as error:
        detail = f"it can't be read as DDL: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error


def read_roles(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """The roles that the database's DDL names."""
    return tuple(row[0] for row in connection.execute(ROLES_QUERY))
