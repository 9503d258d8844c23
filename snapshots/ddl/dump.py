"""Dump the DDL of a shard, correct pg_dump's faults, read the DDL back, and list the roles that it names.

The stored object is pg_dump's own archive, which pg_restore can restore without Cutline. Two kinds of entries are added
before pg_dump's: statements that drop objects which every new database has but this one lacks, and an entry that
records its search_path.

The statement for a faulty identity sequence is rewritten from the catalogs. In the statement for a faulty table, a
constraint is corrected only where the text is exactly what pg_dump writes for it, judging by the catalogs, and only
outside quotes: everything else that a table's owner can choose (names, defaults) is quoted. Texts are raw
(nodes.encodings), and all identifiers are quoted.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import zstandard
from msgspec import Struct, field

from cutline.fleet.config import Node
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import as_connected, connect, program_connection, raising_unreachable
from cutline.nodes.encodings import RAW, raw_text
from cutline.nodes.preconditions import check_dump_settings
from cutline.nodes.programs import ProgramFailedError, programs_for, run_tool
from cutline.nodes.relation_locks import LockWatch, locked_error
from cutline.nodes.watch import Watch, WatchOfSome
from cutline.snapshots.ddl.database_facts import read_search_path
from cutline.snapshots.ddl.ddl_archive import (
    SEQUENCE,
    Contents,
    DdlArchive,
    DumpFormatError,
    NewEntry,
    read_contents,
    read_header,
    rewrite,
    statements_of_entry,
)
from cutline.snapshots.ddl.fingerprint import ONE_SNAPSHOT
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DDL, StoredObject
from cutline.snapshots.records.documents import ManifestError, decompress
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.storage.store import ObjectStore, stoppable_requests
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

# From version 18 on, pg_dump writes these names unquoted (dumpTableSchema, for inherited columns). A name with a space
# is then a syntax error, and a name with a capital letter becomes a different name.
UNQUOTED_QUERY = """
SELECT c.conrelid::bigint, namesend(c.conname), namesend(a.attname)
  FROM pg_constraint c JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
 WHERE c.contype = 'n' AND NOT a.attislocal AND quote_ident(c.conname) <> c.conname
 ORDER BY c.oid
"""
# For older servers, pg_dump 18 writes these constraints without names, in a place where only version 18 accepts them.
INHERITED_QUERY = """
SELECT c.oid::bigint, namesend(n.nspname), namesend(c.relname), namesend(a.attname)
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE current_setting('server_version_num')::int < 180000 AND c.relkind IN ('r', 'f') AND a.attnum > 0
   AND a.attnotnull AND NOT a.attislocal AND NOT a.attisdropped
 ORDER BY c.oid, a.attnum
"""
# pg_dump does not write the type of an identity column's sequence (dumpSequence), so the sequence would get the type of
# its column. That is an error if the type is too small for the sequence's bounds. CREATE TABLE … (LIKE … INCLUDING
# IDENTITY) and ALTER SEQUENCE … AS create sequences with a different type.
OTHER_TYPES_QUERY = """
SELECT c.oid::bigint, namesend(tn.nspname), namesend(t.relname), namesend(a.attname), namesend(n.nspname),
       namesend(c.relname), a.attidentity = 'a', s.seqtypid::regtype::text, s.seqstart, s.seqmin, s.seqmax,
       s.seqincrement, s.seqcache, s.seqcycle,
       CASE WHEN c.relpersistence <> t.relpersistence
            THEN CASE c.relpersistence WHEN 'u' THEN 'UNLOGGED' ELSE 'LOGGED' END ELSE '' END
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0 AND d.deptype = 'i'
       AND d.refclassid = 'pg_class'::regclass
  JOIN pg_class t ON t.oid = d.refobjid JOIN pg_namespace tn ON tn.oid = t.relnamespace
  JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
 WHERE a.atttypid <> s.seqtypid
 ORDER BY c.oid
"""
PG_CLASS, TABLES = 1259, ("TABLE", "FOREIGN TABLE")
BEGIN, BEGIN_UNNAMED = "\n    CONSTRAINT ", "\n    NOT NULL "
# Matches the parts that a scan of a table's statement skips, and the beginning of such a constraint. A doubled quote is
# read as two adjacent strings. pg_dump writes no block comments and, for tables, no dollar quotes. U& before a quote
# makes no difference.
QUOTED_OR_BEGIN = re.compile(
    rf"""--[^\n]*|[eE]'(?:[^'\\]|\\.)*(?:'|\Z)|'[^']*(?:'|\Z)|"[^"]*(?:"|\Z)|(?P<begin>{BEGIN}|{BEGIN_UNNAMED})""",
    re.DOTALL,
)
ENDS = re.compile(r"(?: NO INHERIT)?(?:,?\n)")


class UnquotedName(Struct, frozen=True):
    """A NOT NULL constraint whose name needs quotes, and its column."""

    constraint: str
    column: str


class InheritedNotNull(Struct, frozen=True):
    """An inherited column that is NOT NULL, on a server whose NOT NULL constraints have no names."""

    schema: str
    table: str
    column: str


class OtherType(Struct, frozen=True):
    """An identity column's sequence whose type differs from the column's.

    `logging` is "LOGGED" or "UNLOGGED" if it differs from the table's.
    """

    table_schema: str
    table: str
    column: str
    schema: str
    name: str
    is_always: bool
    type: str
    start: int
    smallest: int
    largest: int
    increment: int
    cache: int
    cycles: bool
    logging: str = ""


class DumpFaults(Struct, frozen=True):
    """The relations whose entries pg_dump writes incorrectly, by oid: tables with faulty constraints, and sequences."""

    names: Mapping[int, list[UnquotedName]] = field(default_factory=dict)
    inherited: Mapping[int, list[InheritedNotNull]] = field(default_factory=dict)
    types: Mapping[int, OtherType] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.names or self.inherited or self.types)

    def correct(self, body: bytes, contents: Contents) -> dict[int, str]:
        """Return the corrected statements for the archive's faulty entries, by number."""
        corrected: dict[int, str] = {}
        for entry in contents.entries:
            oid = entry.oid if entry.catalog == PG_CLASS else 0
            if entry.kind in TABLES and oid in self.names:
                corrected[entry.number] = quote_names(statements_of_entry(body, entry), self.names[oid])
            elif entry.kind in TABLES and oid in self.inherited:
                corrected[entry.number] = set_not_null(statements_of_entry(body, entry), self.inherited[oid])
            elif entry.kind == SEQUENCE and oid in self.types:
                corrected[entry.number] = write_identity(self.types[oid])
        return corrected


def read_dump_faults(connection: psycopg.Connection[Any]) -> DumpFaults:
    """Find the database's relations whose entries pg_dump writes incorrectly. No transaction may be open."""
    with connection.transaction():
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        unquoted = connection.execute(UNQUOTED_QUERY).fetchall()
        inherited_columns = connection.execute(INHERITED_QUERY).fetchall()
        others = connection.execute(OTHER_TYPES_QUERY).fetchall()
    names: dict[int, list[UnquotedName]] = {}
    for oid, constraint, column in unquoted:
        names.setdefault(oid, []).append(UnquotedName(raw_text(constraint), raw_text(column)))
    inherited: dict[int, list[InheritedNotNull]] = {}
    for oid, *texts in inherited_columns:
        inherited.setdefault(oid, []).append(InheritedNotNull(*(raw_text(text) for text in texts)))
    types: dict[int, OtherType] = {}
    for oid, *given in others:
        name = [raw_text(text) for text in given[:5]]
        types[oid] = OtherType(name[0], name[1], name[2], name[3], name[4], *given[5:])
    return DumpFaults(names, inherited, types)


def quote_names(text: str, names: Iterable[UnquotedName]) -> str:
    """Quote the names of these constraints in the statement for a table, wherever they are unquoted."""
    # Try longer names first: a longer name may begin with a shorter name.
    corrections = [
        (
            f"{BEGIN}{unquoted_name.constraint} NOT NULL {column}",
            f"{BEGIN}{quote_identifier(unquoted_name.constraint)} NOT NULL {column}",
        )
        for unquoted_name in sorted(names, key=lambda name: -len(name.constraint))
        for column in [quote_identifier(unquoted_name.column)]
    ]
    pieces: list[str] = []
    offset = done = 0
    while found := QUOTED_OR_BEGIN.search(text, offset):
        offset = found.end()
        if found["begin"]:
            start = found.start()
            for written, quoted in corrections:
                if text.startswith(written, start) and ENDS.match(text, start + len(written)):
                    pieces += [text[done:start], quoted]
                    offset = done = start + len(written)
                    break
    return "".join([*pieces, text[done:]])


def set_not_null(text: str, inherited: Iterable[InheritedNotNull]) -> str:
    """Remove these constraints from the statement for a table, and append statements that set the columns NOT NULL.

    pg_dump before 18 writes such statements itself; these are not changed.
    """
    for null in inherited:
        column = quote_identifier(null.column)
        written = f"{BEGIN_UNNAMED}{column}"
        for match in QUOTED_OR_BEGIN.finditer(text):
            start, end = match.start(), match.start() + len(written)
            if match["begin"] and text.startswith(written, start) and ENDS.match(text, end):
                before, after = text[:start], text[end:]
                # Remove the comma after the constraint or, at the end of the list, the comma before it.
                text = before + after[1:] if after.startswith(",") else before.removesuffix(",") + after
                table = f"{quote_identifier(null.schema)}.{quote_identifier(null.table)}"
                text += f"\nALTER TABLE ONLY {table} ALTER COLUMN {column} SET NOT NULL;\n"
                break
    return text


def write_identity(one: OtherType) -> str:
    """Return the statements that make the column an identity column whose sequence has its own type and bounds."""
    name = f"{quote_identifier(one.schema)}.{quote_identifier(one.name)}"
    table = f"{quote_identifier(one.table_schema)}.{quote_identifier(one.table)}"
    statements = (
        f"ALTER TABLE {table} ALTER COLUMN {quote_identifier(one.column)}"
        f" ADD GENERATED {'ALWAYS' if one.is_always else 'BY DEFAULT'} AS IDENTITY (\n    SEQUENCE NAME {name}\n"
        f"    INCREMENT BY {one.increment}\n    CACHE {one.cache}\n    {'' if one.cycles else 'NO '}CYCLE\n);\n"
        f"ALTER SEQUENCE {name} AS {one.type} MINVALUE {one.smallest} MAXVALUE {one.largest}"
        f" START WITH {one.start} RESTART;\n"
    )
    return statements + (f"ALTER SEQUENCE {name} SET {one.logging};\n" if one.logging else "")


DUMP_SECONDS_MAX = 3600
# The archive for 10,000 tables is 10 MB.
DDL_BYTES_MAX = 512 << 20
UNKNOWN_SIZE, PIECE_BYTES = -1, 1 << 20
# The kinds of entries that Cutline adds to pg_dump's.
DROP, PATH_ENTRY = "DROP", "SEARCH PATH"
# Owners and grantees. pg_shdepend does not list the bootstrap superuser, which is pinned, so its objects are looked up.
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
# Objects that every new database has. pg_dump does not record that they were dropped.
DROPPED_QUERY = """
SELECT 'SCHEMA public', 'DROP SCHEMA "public";' WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'public')
UNION ALL
SELECT 'EXTENSION plpgsql', 'DROP EXTENSION "plpgsql";'
 WHERE NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'plpgsql')
"""


# pg_dump's message for an object whose owner does not exist, which PostgreSQL prevents unless its catalogs are damaged.
NO_OWNER = re.compile(r"role with OID ([0-9]+) does not exist")
FIND_OWNED = (
    "to find what belongs to this role, which does not exist: SELECT oid::regclass::text FROM pg_class WHERE relowner ="
    " {owner} UNION ALL SELECT oid::regprocedure::text FROM pg_proc WHERE proowner = {owner} UNION ALL SELECT"
    " oid::regtype::text FROM pg_type WHERE typowner = {owner} AND typrelid = 0 AND typelem = 0 UNION ALL"
    " SELECT oid::regnamespace::text FROM pg_namespace WHERE nspowner = {owner} UNION ALL SELECT datname FROM"
    " pg_database WHERE datdba = {owner} ORDER BY 1;"
)
GIVE_OWNER = "then, as a superuser: ALTER … OWNER TO …;"


class ArchiveUnknownError(RefusedError):
    """pg_dump wrote an archive in a format that Cutline can't read."""


def dump_archive(
    node: Node,
    exported: str | None,
    watch: Watch | WatchOfSome,
    check: Callable[[psycopg.Connection[Any]], None] | None = None,
) -> bytes:
    """Dump a database's DDL as a pg_dump archive, and correct pg_dump's faults.

    The dump reflects the snapshot `exported`, or the current state if that is None. If `check` is given, it reflects
    the snapshot of a transaction in which `check` is called first. pg_dump is stopped if `watch` finds that a node is
    not responding. Raises RelationLockedError if a table or view stays locked, and ArchiveUnknownError.
    """
    return _dump(node, exported, watch, lambda pieces, _: b"".join(pieces), check)


def _compress(pieces: Iterator[bytes], size_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj(size=size_bytes)
    return b"".join([*(compressor.compress(piece) for piece in pieces), compressor.flush()])


def _dump(
    node: Node,
    exported: str | None,
    watch: Watch | WatchOfSome,
    take: Callable[[Iterator[bytes], int], bytes],
    check: Callable[[psycopg.Connection[Any]], None] | None = None,
) -> bytes:
    """Do the same as `dump_archive`, and return what `take` makes of the archive.

    `take` gets the archive in pieces, because that of 100,000 tables has 130 MB, and its size in bytes.
    """
    application = f"cutline pg_dump {secrets.token_hex(4)}"
    with ExitStack() as stack:
        stack.enter_context(raising_unreachable(node))
        connection = stack.enter_context(connect(node))
        folder = stack.enter_context(TemporaryDirectory(prefix="cutline-ddl-"))
        check_dump_settings(node, connection)
        needs_tls = bool(connection.pgconn.ssl_in_use)
        access = program_connection(as_connected(node, connection), needs_tls=needs_tls, application_name=application)
        path, programs = Path(folder) / "archive", programs_for(node, connection)
        locks = LockWatch(connection, application)
        if check is not None:
            stack.enter_context(connection.transaction())
            connection.execute(ONE_SNAPSHOT)
            check(connection)
            (exported,) = connection.execute("SELECT pg_export_snapshot()").fetchone() or (None,)

        @contextmanager
        def ending(act: Callable[[], None]) -> Iterator[None]:
            with watch.on_silence(act), locks.ending(act):
                yield

        try:
            run_tool(
                # Constants in the DDL depend on the session's settings, so dump and restore both use ours.
                "pg_dump",
                "--dbname",
                access.conninfo,
                "--format=custom",
                "--compress=0",
                "--no-sync",
                "--no-password",
                # --schema-only would omit the refresh of materialized views. --lock-wait-timeout would bound only the
                # waits for locks on tables: LockWatch bounds all waits.
                "--section=pre-data",
                "--section=post-data",
                "--no-large-objects" if programs.has("--no-large-objects") else "--no-blobs",
                *(["--no-statistics"] if programs.has("--no-statistics") else []),
                "--no-subscriptions",
                "--quote-all-identifiers",
                f"--encoding={RAW}",
                f"--file={path}",
                *([f"--snapshot={exported}"] if exported else []),
                seconds_max=DUMP_SECONDS_MAX,
                environment=access.environment,
                folder=programs.folder,
                ended_by=ending,
            )
        except ProgramFailedError as error:
            if locks.found:
                raise locked_error(node, "reading the DDL", locks.found) from error
            error.message = f"node {node.id}: {error.message}"
            if match := NO_OWNER.search(error.message):
                error.hint = "\n".join([FIND_OWNED.format(owner=match[1]), GIVE_OWNER])
            raise
        first = [NewEntry(DROP, name, f"{statement}\n") for name, statement in connection.execute(DROPPED_QUERY)]
        if (search_path := read_search_path(connection)) is not None:
            first.append(NewEntry(PATH_ENTRY, search_path))
        faults = read_dump_faults(connection)
        try:
            if first or faults:
                body = path.read_bytes()
                contents = read_contents(body)
                body = rewrite(body, contents, faults.correct(body, contents), first)
                return take(iter([body]), len(body))
            # Reading the entries of 100,000 tables takes seconds: only `check` and `restore` do it.
            with path.open("rb") as file:
                size_bytes = path.stat().st_size
                read_header(file.read(PIECE_BYTES), size_bytes)
                file.seek(0)
                return take(iter(lambda: file.read(PIECE_BYTES), b""), size_bytes)
        except DumpFormatError as error:
            raise ArchiveUnknownError(
                f"node {node.id}: the archive of {programs.folder}/pg_dump can't be read: {error}",
                hint="use a pg_dump that this version of Cutline supports: set [tools] postgresql in fleet.toml",
                details={"node": node.id},
            ) from error


def store_ddl(
    store: ObjectStore,
    node: Node,
    prefix: str,
    exported: str | None,
    watch: Watch | WatchOfSome,
    check: Callable[[psycopg.Connection[Any]], None] | None = None,
) -> list[StoredObject]:
    """Do the same as `dump_archive`, and store the archive, compressed with zstd."""
    body = _dump(node, exported, watch, _compress, check)
    key = f"{prefix}/{DDL}-{secrets.token_hex(4)}.dump.zst"
    with stoppable_requests() as stop, watch.on_silence(stop):
        digest = create_or_find(store, key, body)
    return [StoredObject(key, DDL, node.id, len(body), digest, {})]


def find_ddl(chain: Chain, shard: str) -> StoredObject:
    """Return the archive of the shard's DDL; raise ManifestError if no commit lists it."""
    if (stored := chain.ddl_object(shard)) is not None:
        return stored
    raise ManifestError(
        f"snapshot {chain.name} contains no DDL for shard {shard}",
        hint=f"it can't be restored; {NEW_CHAIN}",
        ends_chain=ChainEnd.PERHAPS,
        details={"node": shard},
    )


def read_ddl(body: bytes, stored: StoredObject) -> DdlArchive:
    """Decompress and read a stored archive; raise ObjectDamagedError if it can't be read.

    The caller has verified that `body` is the committed object.
    """
    try:
        ddl = decompress(body, DDL_BYTES_MAX)
        if zstandard.frame_content_size(body) not in (UNKNOWN_SIZE, len(ddl)):
            raise ValueError("it ends early")
        return DdlArchive.of(ddl)
    except (zstandard.ZstdError, ValueError) as error:
        detail = f"it can't be read as DDL: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error


def read_stored_ddl(store: ObjectStore, chain: Chain, shard: str) -> DdlArchive:
    """Return the archive of a shard's DDL; raise ObjectDamagedError or ManifestError."""
    stored = find_ddl(chain, shard)
    return read_ddl(read_listed(store, shard, stored.key, (stored.size, stored.digest)), stored)


def read_roles(connection: psycopg.Connection[Any]) -> tuple[str, ...]:
    """Return the roles that the database's DDL names."""
    return tuple(row[0] for row in connection.execute(ROLES_QUERY))
