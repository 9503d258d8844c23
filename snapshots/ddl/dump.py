"""Dump the DDL of a shard and list the roles that it names.

The DDL is stored in sections, in the order in which a restore runs them: objects before the rows, objects after them,
the refresh of materialized views, and event triggers, which must not fire for any of that.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import zstandard

from fleet.config import Node
from fleet.hints import NEW_CHAIN
from fleet.nodes.connections import connect, program_connection, raising_unreachable
from fleet.nodes.encodings import RAW, raw_bytes, raw_text
from fleet.nodes.relation_locks import LockWatch, locked_error
from fleet.nodes.watch import Watch
from fleet.programs.clients import ClientPrograms, programs_for
from fleet.programs.wheel import ProgramFailedError, run_tool
from snapshots.ddl.dump_faults import DumpFaults, read_dump_faults
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
# A section of 10,000 tables has 5 MB.
DDL_BYTES_MAX, WINDOW_BYTES_MAX = 512 << 20, 128 << 20
UNKNOWN_SIZE = -1
# A line of pg_restore's list: the entry's number, the oids of its catalog and of itself, its type, schema and name.
# pg_dump replaces the newlines of names.
ENTRY = re.compile(r"^(?P<number>\d+); (?P<catalog>\d+) (?P<oid>\d+) (?P<what>.*)$", re.MULTILINE)
PG_CLASS = 1259
# Entries of pg_dump's two sections that go to a section of ours, or to none. The comment on Cutline's own publication
# is left out: it records a node's settings before it was made read-only, and a restored database is not read-only.
EVENT_TRIGGER_ENTRY = re.compile(r"(?:(?:COMMENT|SECURITY LABEL) - )?EVENT TRIGGER ")
REFRESH_ENTRY = re.compile(r"MATERIALIZED VIEW DATA ")
OMITTED_ENTRY = re.compile(rf'COMMENT - PUBLICATION "?{OWN_PUBLICATION}"? ')
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
SELECT 'DROP SCHEMA "public";' WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'public')
UNION ALL
SELECT 'DROP EXTENSION "plpgsql";' WHERE NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'plpgsql')
"""


def dump_sections(node: Node, exported: str | None, watch: Watch) -> dict[str, str]:
    """Dump a database's DDL, by section: plain SQL as raw text (fleet.nodes.encodings).

    Literals and comments may hold any bytes of the database's encoding. The dump shows the snapshot `exported`, or the
    current state if that is None. It is ended if `watch` finds a node silent. Raises RelationLockedError if a table or
    view stays locked.
    """
    application = f"cutline pg_dump {secrets.token_hex(4)}"
    with raising_unreachable(node), connect(node) as connection, TemporaryDirectory(prefix="cutline-ddl-") as folder:
        needs_tls = bool(connection.pgconn.ssl_in_use)
        access = program_connection(node, needs_tls=needs_tls, application_name=application)
        archive = _Dump(Path(folder) / "archive", programs_for(node, connection))
        locks = LockWatch(connection, application)

        @contextmanager
        def ending(act: Callable[[], None]) -> Iterator[None]:
            with watch.on_silence(act), locks.ending(act):
                yield

        try:
            run_tool(
                # Constants in the DDL depend on the session's settings, so the dump uses ours, as the restore does.
                "pg_dump", "--dbname", access.conninfo, "--format=custom",
                "--compress=0", "--no-sync",
                # Not --schema-only, which omits the refresh of materialized views. Not --lock-wait-timeout, which
                # bounds the locks of tables alone: LockWatch bounds all.
                "--section=pre-data", "--section=post-data",
                "--no-large-objects" if archive.programs.has("--no-large-objects") else "--no-blobs",
                *(["--no-statistics"] if archive.programs.has("--no-statistics") else []),
                "--no-subscriptions", "--quote-all-identifiers", f"--encoding={RAW}", f"--file={archive.path}",
                *([f"--snapshot={exported}"] if exported else []),
                seconds_max=DUMP_SECONDS_MAX, environment=access.environment, folder=archive.programs.folder,
                ended_by=ending,
            )  # fmt: skip
        except ProgramFailedError as error:
            if not locks.found:
                raise
            raise locked_error(node, "reading the DDL", locks.found) from error
        sections = _sections_of(archive, read_dump_faults(connection))
        dropped = "".join(f"{statement}\n" for (statement,) in connection.execute(DROPPED_QUERY))
        return sections | {PRE_DATA: read_search_path(connection) + dropped + sections[PRE_DATA]}


@dataclass(frozen=True, slots=True)
class _Dump:
    """pg_dump's archive, and the programs that wrote it and read it."""

    path: Path
    programs: ClientPrograms


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the archive: its number, and the oid of the relation that it creates, 0 if it creates none."""

    number: str
    oid: int


def _sections_of(archive: _Dump, faults: DumpFaults) -> dict[str, str]:
    """The SQL of each section of pg_dump's archive, without pg_dump's faults."""
    listed = run_tool("pg_restore", "--list", str(archive.path), folder=archive.programs.folder).stdout
    found = [
        (
            _Entry(entry["number"], int(entry["oid"]) if int(entry["catalog"]) == PG_CLASS else 0),
            _section_of(entry["what"]),
        )
        for entry in ENTRY.finditer(listed)
    ]
    scripts: dict[str, str] = {}
    for section in SECTIONS:
        # pg_restore itself divides the other entries into pre-data and post-data.
        chosen = [entry for entry, own in found if own == (section if section in (REFRESH, EVENT_TRIGGERS) else "")]
        scripts[section] = _script(archive, section, chosen, faults) if chosen else ""
    return scripts


def _section_of(what: str) -> str | None:
    """REFRESH or EVENT_TRIGGERS; "" if pg_restore chooses the section; None if the entry is omitted."""
    for section, pattern in ((EVENT_TRIGGERS, EVENT_TRIGGER_ENTRY), (REFRESH, REFRESH_ENTRY), (None, OMITTED_ENTRY)):
        if pattern.match(what):
            return section
    return ""


def _script(archive: _Dump, section: str, entries: Sequence[_Entry], faults: DumpFaults) -> str:
    """The SQL of the archive's entries, in the archive's order; those with a fault of pg_dump are written apart."""
    pieces: list[str] = []
    settings: list[str] = []
    for oid, some in groupby(entries, lambda entry: entry.oid if faults.has(entry.oid) else 0):
        lines = _lines_of(archive, section, some)
        if pieces:
            # Each text begins with the same settings.
            settings = settings or _lines_of(archive, section, ())
            same = takewhile(lambda pair: pair[0] == pair[1], zip(lines, settings, strict=False))
            lines = lines[len(list(same)) :]
        text = "\n".join(lines)
        pieces.append(faults.correct(oid, text) if oid else text)
    return "\n".join(pieces)


def _lines_of(archive: _Dump, section: str, entries: Iterable[_Entry]) -> list[str]:
    """The lines that pg_restore writes for the entries.

    It is raw text (fleet.nodes.encodings): literals and comments may hold any bytes of the database's encoding.
    The lines of psql's restrict mode, which no server understands, are removed.
    """
    guard = secrets.token_hex(16)
    chosen, script = archive.path.with_name("entries"), archive.path.with_name("script")
    chosen.write_text("".join(f"{entry.number};\n" for entry in entries))
    run_tool(
        "pg_restore", f"--use-list={chosen}", f"--file={script}",
        # Older ones write no lines for psql's restrict mode.
        *([f"--restrict-key={guard}"] if archive.programs.has("--restrict-key") else []),
        *([f"--section={section}"] if section in (PRE_DATA, POST_DATA) else []), str(archive.path),
        folder=archive.programs.folder,
    )  # fmt: skip
    lines = raw_text(script.read_bytes()).split("\n")
    return [line for line in lines if line not in (f"\\restrict {guard}", f"\\unrestrict {guard}")]


def store_ddl(store: ObjectStore, node: Node, prefix: str, exported: str | None, watch: Watch) -> list[StoredObject]:
    """Dump a shard's DDL and store its sections, compressed with zstd."""
    stored: list[StoredObject] = []
    for section, script in dump_sections(node, exported, watch).items():
        body = zstandard.compress(raw_bytes(script))
        key = f"{prefix}/{section}-{secrets.token_hex(4)}.sql.zst"
        create_or_find(store, key, body)
        stored.append(StoredObject(key, section, node.id, len(body), digest(body), {}))
    return stored


def find_ddl_objects(chain: Chain, shard: str) -> tuple[StoredObject, ...]:
    """The objects of the shard's DDL, in the order of SECTIONS; raise ManifestError if one is not listed."""
    objects = {stored.kind: stored for stored in chain.schema_objects(shard)}
    if missing := [section for section in SECTIONS if section not in objects]:
        raise ManifestError(
            f"snapshot {chain.name} lists no {' and no '.join(missing)} DDL of shard {shard}",
            hint=f"it can't be restored; {NEW_CHAIN}",
            details={"node": shard},
        )
    return tuple(objects[section] for section in SECTIONS)


def read_ddl(body: bytes, stored: StoredObject) -> str:
    """The SQL of a stored section as raw text; raise ObjectDamagedError if it can't be read.

    The caller has verified that `body` is the committed object.
    """
    try:
        # The size that a frame declares is not believed before the frame is read, as far as the limit.
        with zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).stream_reader(body) as reader:
            script = reader.read(DDL_BYTES_MAX + 1)
        if len(script) > DDL_BYTES_MAX:
            raise ValueError(f"it is larger than {DDL_BYTES_MAX >> 20} MiB")
        if zstandard.frame_content_size(body) not in (UNKNOWN_SIZE, len(script)):
            raise ValueError("it ends early")
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        detail = f"it can't be read as DDL: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error
    return raw_text(script)


def read_roles(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """The roles that the database's DDL names."""
    return tuple(row[0] for row in connection.execute(ROLES_QUERY))
