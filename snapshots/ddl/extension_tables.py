"""Read the rows of extension configuration tables, store them, and read them back.

An extension marks the tables that contain rows which CREATE EXTENSION does not create (pg_extension_config_dump;
PostgreSQL manual, "Extension Configuration Tables"), usually with a condition that excludes the extension's own rows. A
publication can't contain such a table if it has a different owner, so the rows are read with COPY after each cut and
stored in full with each commit. A table whose statements exceed BYTES_MAX is left out and reported.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import Any

import msgspec
import psycopg
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.config import GroupRules, Node
from cutline.fleet.record import from_json, to_builtins
from cutline.fleet.table_names import TABLE_NAME, is_included, table_name
from cutline.nodes.connections import refuse_views
from cutline.nodes.encodings import RAW, fetch_texts
from cutline.nodes.left_out import WHY, LeftOut, LeftOutKind
from cutline.nodes.server_errors import shorten_message
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.operations.operation import Operation
from cutline.snapshots.records.commit import EXTENSION_ROWS, Commit, StoredObject
from cutline.snapshots.records.documents import ddl_prefix, decompress
from cutline.snapshots.records.kinds import ExtensionRows, ExtensionSequence, ExtensionTable
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

# A server needs 150 MB to run a script sent as one message of 16 MiB.
BYTES_MAX = 16 << 20
# Limits for all of a shard's tables together, when they are read back.
SCRIPT_BYTES_MAX, HEADER_BYTES_MAX = 256 << 20, 16 << 20
ROWS_AT_ONCE = 500
COMMENT = b"-- "
PAUSE_SECONDS, LOCK_SECONDS_MAX = 0.1, 10
# The wait for locks that can't be requested with NOWAIT. Other sessions look for a deadlock after a second
# (deadlock_timeout), so one of them is cancelled only if that second ends within these milliseconds.
LOCK_MILLISECONDS_MAX = 10
# Like pg_dump, omit partitioned tables: their partitions may be marked.
MARKED_QUERY = f"""
SELECT c.relkind = 'S', c.oid::bigint, e.extname, n.nspname, c.relname, {TABLE_NAME},
       coalesce(e.extcondition[m.place], '') <> '', t.rolsuper AND o.rolsuper,
       ARRAY(SELECT k.confrelid::bigint FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'f')
  FROM pg_extension e CROSS JOIN unnest(e.extconfig) WITH ORDINALITY AS m (relation, place)
  JOIN pg_class c ON c.oid = m.relation JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_roles t ON t.oid = c.relowner JOIN pg_roles o ON o.oid = e.extowner
 WHERE c.relkind IN ('r', 'S') ORDER BY e.extname, m.place
"""
LOCKS_QUERY = """
SELECT c.oid::bigint, textsend(format('LOCK TABLE ONLY %%I.%%I IN ACCESS SHARE MODE NOWAIT', n.nspname, c.relname))
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%s::oid[])
"""
# For a table, returns a query that checks whether the name still belongs to it, the beginning and the end of its INSERT
# statements, and the COPY that prints the rows between them as lists of constants. COPY reads the table without its
# children, and is planned only if there is a condition. A row from the snapshot replaces the row with the same key: the
# primary key, or a unique key of NOT NULL columns. Generated columns are not inserted, but may be part of a key.
STATEMENTS_QUERY = """
WITH key AS (
  SELECT i.indkey, i.indnkeyatts FROM pg_index i
   WHERE i.indrelid = %(table)s AND i.indisunique AND i.indimmediate AND i.indisvalid
     AND i.indpred IS NULL AND i.indexprs IS NULL
     AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND NOT a.attnotnull
                        AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
   ORDER BY i.indisprimary DESC, i.indexrelid LIMIT 1
), attribute AS (
  SELECT a.attnum, a.attidentity, a.attgenerated = '' AS is_given, quote_ident(a.attname) AS name,
         a.attnum = ANY (SELECT unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) FROM key i) AS is_key
    FROM pg_attribute a
   WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
), listed AS (
  SELECT string_agg(name, ', ' ORDER BY attnum) FILTER (WHERE is_given) AS names,
         string_agg(name, ', ' ORDER BY attnum) FILTER (WHERE is_key) AS key,
         string_agg(format('%%1$s = EXCLUDED.%%1$s', name), ', ' ORDER BY attnum)
           FILTER (WHERE is_given AND NOT is_key AND attidentity <> 'a') AS others
    FROM attribute
), marked AS (
  SELECT format('%%I.%%I', n.nspname, c.relname) AS name, m.condition
    FROM pg_extension e CROSS JOIN unnest(e.extconfig, e.extcondition) AS m (relation, condition)
    JOIN pg_class c ON c.oid = m.relation JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE c.oid = %(table)s
)
SELECT textsend(format('SELECT %%L::regclass::oid = %%s', name, %(table)s::oid)),
       textsend(format(E'INSERT INTO %%s (%%s) OVERRIDING SYSTEM VALUE VALUES\n(', name, names)),
       textsend(')' || CASE WHEN key IS NULL THEN ''
                WHEN others IS NULL THEN format(E'\nON CONFLICT (%%s) DO NOTHING', key)
                ELSE format(E'\nON CONFLICT (%%s) DO UPDATE SET %%s', key, others) END || E';\n'),
       textsend(format('COPY %%s TO STDOUT '
                       '(FORMAT csv, QUOTE E''\\x27'', ESCAPE E''\\x27'', FORCE_QUOTE *, NULL ''NULL'')',
                CASE condition WHEN '' THEN format('%%s (%%s)', name, names)
                ELSE format('(SELECT %%s FROM ONLY %%s %%s)', names, name, condition) END))
  FROM listed CROSS JOIN marked WHERE names IS NOT NULL
"""


# Elements of the statements: names as quoted by format(), and values as quoted by COPY. NUL would end a message to the
# server.
NAME = rb'(?:"(?:[^"\0]++|"")*+"|[a-z_][a-z0-9_]*+)'
VALUE = rb"(?:'(?:[^'\0]++|'')*+'|NULL)"
NAMES = NAME + rb"(?:, " + NAME + rb")*+"
SET = NAME + rb" = EXCLUDED\." + NAME
INSERT = re.compile(
    rb"INSERT INTO (" + NAME + rb")\.(" + NAME + rb") \(" + NAMES + rb"\) OVERRIDING SYSTEM VALUE VALUES\n"
)
ROW = re.compile(rb"\(" + VALUE + rb"(?:," + VALUE + rb")*+\)")
CONFLICT = re.compile(
    rb"(?:\nON CONFLICT \(" + NAMES + rb"\) DO (?:NOTHING|UPDATE SET " + SET + rb"(?:, " + SET + rb")*+))?+;\n"
)
NEXT_ROW = b",\n"
# Non-ASCII bytes, including invalid bytes as escaped by fetch_texts.
OTHER_BYTES = re.compile(rb"(?:[\x80-\xff]|\\x[0-9a-f]{2})++")


class _TooManyError(Exception):
    """A table has more bytes than can be stored."""


class _UnfitTableError(Exception):
    """A table can't be stored, for the reason in the text."""


class MarkedTable(Struct, frozen=True):
    """A configuration table in the catalogs; `label` is its name in rules and output.

    If `has_condition`, only some of its rows are dumped. If `is_trusted`, superusers own the table and its extension.
    `references` holds the oids of the tables that its foreign keys reference.
    """

    oid: int
    extension: str
    schema: str
    name: str
    label: str
    has_condition: bool
    is_trusted: bool
    references: tuple[int, ...]


class _CompressedRows(Struct, frozen=True):
    """A table's row count, and its statements: their size before compression, and the compressed bytes."""

    count: int
    size: int
    body: bytes


class ConfigurationRows(Struct, frozen=True):
    """The rows of a configuration table as statements, in the encoding of its database."""

    table: ExtensionTable
    statements: bytes


class ExtensionsOfShard(Struct, frozen=True):
    """The rows of a shard's configuration tables, and the sequences that its extensions have marked."""

    tables: tuple[ConfigurationRows, ...] = ()
    sequences: tuple[ExtensionSequence, ...] = ()

    def digests(self) -> dict[str, bytes]:
        """Read every row; return, for each table, a digest of its rows and the statements that contain them."""
        return {
            table_name(table.table.schema, table.table.name): _digest_rows(table.statements) for table in self.tables
        }

    def of(self, extensions: Collection[str]) -> ExtensionsOfShard:
        """Return the tables and sequences of these extensions."""
        tables = tuple(table for table in self.tables if table.table.extension in extensions)
        return replace(
            self,
            tables=tables,
            sequences=tuple(sequence for sequence in self.sequences if sequence.extension in extensions),
        )


def store_extension_rows(
    store: ObjectStore, sessions: Sessions, operation: Operation, rules: GroupRules
) -> tuple[tuple[StoredObject, ...], tuple[LeftOut, ...]]:
    """Store the rows of each shard's configuration tables; return the objects, and the tables that could not be read.

    Raises NodeUnreachableError.
    """
    read = sessions.ask_named_primaries(partial(_read_rows, rules=rules))

    def store_one(shard: str) -> StoredObject | None:
        body, _ = read[shard]
        if not body:
            return None
        prefix = ddl_prefix(operation.snapshot, shard, operation.id)
        key = f"{prefix}/{EXTENSION_ROWS}-{secrets.token_hex(4)}.sql.zst"
        return StoredObject(key, EXTENSION_ROWS, shard, len(body), create_or_find(store, key, body), {})

    stored = tuple(stored_object for stored_object in in_parallel(store_one, read) if stored_object is not None)
    return stored, tuple(out for _, left_out in read.values() for out in left_out)


def _read_rows(
    node: Node, connection: psycopg.Connection[Any], *, rules: GroupRules
) -> tuple[bytes, tuple[LeftOut, ...]]:
    """Return the object's compressed body (empty if there are no rows), and the tables that could not be read."""
    tables, sequences = _list_marked(connection, rules)
    if not tables:
        return b"", ()
    reader = _TableReader(connection)
    reader.read_all(tables)
    kind, reasons = LeftOutKind.EXTENSION_ROWS, reader.reasons
    left_out = tuple(
        LeftOut(node.id, kind, table.label, WHY[kind].format(reasons[table.oid]))
        for table in tables
        if table.oid in reasons
    )
    described, bodies = list[ExtensionTable](), list[bytes]()
    for table in tables:
        if (rows := reader.rows.get(table.oid)) and rows.count:
            names = {"extension": table.extension, "schema": table.schema, "name": table.name}
            described.append(ExtensionTable(**names, rows=rows.count, size=rows.size))
            bodies.append(rows.body)
    if not described:
        return b"", left_out
    document = ExtensionRows(tables=tuple(described), sequences=tuple(sequences))
    header = COMMENT + msgspec.json.encode(to_builtins(document)) + b"\n"
    return b"".join((zstandard.compress(header), *bodies)), left_out


@contextmanager
def _reading(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run the block in a read-only transaction that sees all tables in one state and gets the server's raw bytes."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        refuse_views(connection)
        connection.execute(f"SET LOCAL client_encoding = '{RAW}'")
        yield


class _TableReader:
    """Reads tables in a session: `rows` holds rows of tables that could be read; `reasons` says why others could not.

    Both are keyed by oid. A table that can't be read does not stop the command: otherwise, a full snapshot would lose
    hours of copying.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.rows: dict[int, _CompressedRows] = {}
        self.reasons: dict[int, str] = {}
        self._connection, self._left = connection, 0

    def read_all(self, tables: Iterable[MarkedTable]) -> None:
        """Read the tables in one transaction; raise psycopg.Error if the session is lost.

        If another session has locked a table or a relation that a condition needs, all tables are read again in a new
        transaction, for up to LOCK_SECONDS_MAX. No lock is held in between, because a session that needs one of these
        tables could otherwise deadlock with ours.
        """
        chosen, refused = list[MarkedTable](), dict[int, str]()
        for table in tables:
            # A query runs the owner's code: casts and operators in the condition, and functions in indexes.
            if table.has_condition and not table.is_trusted:
                refused[table.oid] = (
                    "it has a dump condition, and its owner or its extension's owner is not a superuser"
                )
            else:
                chosen.append(table)
        with _reading(self._connection):
            rows = self._connection.execute(LOCKS_QUERY, ([table.oid for table in chosen],)).fetchall()
        locks = {oid: bytes(lock) for oid, lock in rows}
        # A missing table was dropped after the cut.
        chosen = [table for table in chosen if table.oid in locks]
        pause, ends_at, is_done = PAUSE_SECONDS, time.monotonic() + LOCK_SECONDS_MAX, False
        while not is_done:
            self.rows, self.reasons, self._left = {}, dict(refused), SCRIPT_BYTES_MAX - HEADER_BYTES_MAX
            is_done = self._try_all(chosen, locks, is_last=time.monotonic() > ends_at)
            if not is_done:
                time.sleep(pause)
                pause *= 2

    def _try_all(self, tables: Sequence[MarkedTable], locks: Mapping[int, bytes], *, is_last: bool) -> bool:
        """Read the tables in one transaction; return False at the first locked table, unless this is the last try."""

        def lock(table: MarkedTable) -> None:
            self._connection.execute(locks[table.oid])

        with _reading(self._connection):
            # A condition needs indexes of its table, and possibly other tables; resolving names needs the catalogs.
            self._connection.execute(f"SET LOCAL lock_timeout = {LOCK_MILLISECONDS_MAX}")
            # Lock all tables before the first query, which determines the state that the transaction sees: a table
            # rewritten after that query would appear empty.
            for step in (lock, self._read):
                for table in tables:
                    if table.oid not in self.reasons and not self._try(step, table) and not is_last:
                        return False
        return True

    def _try(self, step: Callable[[MarkedTable], None], table: MarkedTable) -> bool:
        """Run a step for a table, and record the reason if it fails; return False if another session holds a lock."""
        try:
            with self._connection.transaction():
                step(table)
        except _UnfitTableError as error:
            self.reasons[table.oid] = str(error)
        except psycopg.errors.LockNotAvailable:
            what = "it, or a relation that its condition needs," if table.has_condition else "it"
            self.reasons[table.oid] = f"other sessions kept {what} locked for {LOCK_SECONDS_MAX} s"
            return False
        except psycopg.Error as error:
            if self._connection.broken:
                raise
            self.reasons[table.oid] = shorten_message(error)
        return True

    def _read(self, table: MarkedTable) -> None:
        try:
            rows = _compress_rows(self._connection, table, min(BYTES_MAX, self._left))
        except _TooManyError as error:
            limit = f"more than {BYTES_MAX >> 20} MiB"
            full = f"more than {SCRIPT_BYTES_MAX - HEADER_BYTES_MAX >> 20} MiB together with the shard's other tables"
            raise _UnfitTableError(limit if self._left >= BYTES_MAX else full) from error
        self.rows[table.oid] = rows
        self._left -= rows.size


def _list_marked(
    connection: psycopg.Connection[Any], rules: GroupRules
) -> tuple[list[MarkedTable], list[ExtensionSequence]]:
    """List the configuration tables that the rules don't exclude, referenced tables first, and the marked sequences."""
    tables, sequences = dict[int, MarkedTable](), list[ExtensionSequence]()
    for is_sequence, oid, extension, schema, name, *more in fetch_texts(connection, MARKED_QUERY):
        if is_sequence:
            sequences.append(ExtensionSequence(extension=extension, schema=schema, name=name))
        else:
            label, has_condition, is_trusted, references = more
            table = MarkedTable(oid, extension, schema, name, label, has_condition, is_trusted, tuple(references))
            tables[oid] = table
    needed = {
        oid: [other for other in table.references if other in tables and other != oid] for oid, table in tables.items()
    }
    try:
        ordered = list(TopologicalSorter(needed).static_order())
    except CycleError:
        # There is no valid order. A restore names the tables that it can't fill.
        ordered = list(tables)
    return [tables[oid] for oid in ordered if is_included(tables[oid].label, rules)], sequences


def _compress_rows(connection: psycopg.Connection[Any], table: MarkedTable, bytes_max: int) -> _CompressedRows:
    """Read the table's rows as statements; raise _TooManyError if they exceed `bytes_max`, or _UnfitTableError."""
    statements = connection.execute(STATEMENTS_QUERY, {"table": table.oid}).fetchone()
    if statements is None:
        # The table has no columns, or no longer belongs to an extension.
        return _CompressedRows(0, 0, b"")
    is_same, begin, end, copy_rows = map(bytes, statements)
    if connection.execute(is_same).fetchone() != (True,):
        raise _UnfitTableError("since the cut, a different table has taken its name")
    if not _is_named(INSERT.match(begin), table):
        raise _UnfitTableError("it was renamed after the cut")
    # A table that references itself needs a single statement, because a row may precede the row that it references.
    at_once = None if table.oid in table.references else ROWS_AT_ONCE
    compressor, pieces, count, size = zstandard.ZstdCompressor().compressobj(), list[bytes](), 0, 0
    with connection.cursor().copy(copy_rows) as copy:
        # Each message is a row, including its newline.
        lines = (bytes(line[:-1]) for line in copy)
        while some := list(_up_to(bytes_max - size, islice(lines, at_once))):
            statement = begin + (b")" + NEXT_ROW + b"(").join(some) + end
            count, size = count + len(some), size + len(statement)
            if size > bytes_max:
                raise _TooManyError
            pieces.append(compressor.compress(statement))
    return _CompressedRows(count, size, b"".join((*pieces, compressor.flush())))


def _up_to(size_max: int, lines: Iterable[bytes]) -> Iterator[bytes]:
    size = 0
    for line in lines:
        size += len(line)
        if size > size_max:
            raise _TooManyError
        yield line


def read_extension_rows(store: ObjectStore, commit: Commit, shard: str) -> ExtensionsOfShard:
    """Read the shard's configuration tables in the commit; raise ObjectDamagedError."""
    for stored in commit.extension_rows:
        if stored.node == shard:
            return read_extension_rows_object(store, stored)
    return ExtensionsOfShard()


def read_extension_rows_object(store: ObjectStore, stored: StoredObject) -> ExtensionsOfShard:
    """Read the configuration tables in the object; raise ObjectDamagedError."""
    body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
    try:
        return _divide(decompress(body, SCRIPT_BYTES_MAX))
    except (ValueError, msgspec.DecodeError) as error:
        detail = f"it can't be read: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error


def _divide(script: bytes) -> ExtensionsOfShard:
    """Divide a script into tables with their statements; raise ValueError unless they match its first line."""
    first, _, statements = script.partition(b"\n")
    if not first.startswith(COMMENT):
        raise ValueError("its first line does not list its contents")
    document: ExtensionRows = from_json(first.removeprefix(COMMENT), ExtensionRows)
    if sum(table.size for table in document.tables) != len(statements):
        raise ValueError("its first line gives a different size")
    tables, begin = list[ConfigurationRows](), 0
    for table in document.tables:
        end = begin + table.size
        own = statements[begin:end]
        if not _is_filled_by(own, table):
            raise ValueError(
                f"the statements of {table_name(table.schema, table.name)} are not in the form that Cutline writes, or"
                f" do not have its {table.rows:,} rows"
            )
        tables.append(ConfigurationRows(table, own))
        begin = end
    return ExtensionsOfShard(tuple(tables), document.sequences)


def _is_filled_by(statements: bytes, table: ExtensionTable) -> bool:
    """Whether these are only INSERT statements of its rows, as STATEMENTS_QUERY generates them for the table."""
    rows = 0
    try:
        for part in _parts_of(statements):
            if part.re is INSERT and not _is_named(part, table):
                return False
            rows += part.re is ROW
    except ValueError:
        return False
    return rows == table.rows


def _is_named(begin: re.Match[bytes] | None, table: MarkedTable | ExtensionTable) -> bool:
    return begin is not None and _is_name(begin[1], table.schema) and _is_name(begin[2], table.name)


def _is_name(quoted: bytes, name: str) -> bool:
    """Whether the SQL name `quoted` may be `name`. Non-ASCII characters are not compared: the encoding is unknown."""
    plain = quoted[1:-1].replace(b'""', b'"') if quoted.startswith(b'"') else quoted
    return OTHER_BYTES.sub(b"?", plain) == OTHER_BYTES.sub(b"?", name.encode())


def _digest_rows(statements: bytes) -> bytes:
    """Return a digest that does not depend on the order of the rows: COPY prints them in any order."""
    return hashlib.sha256(b"\0".join(sorted(part[0] for part in _parts_of(statements)))).digest()


def _parts_of(statements: bytes) -> Iterator[re.Match[bytes]]:
    """Yield the beginning of each INSERT statement, its rows and its end; raise ValueError for anything else."""
    begin = 0

    def take(kind: re.Pattern[bytes]) -> re.Match[bytes]:
        nonlocal begin
        if (found := kind.match(statements, begin)) is None:
            raise ValueError("this is not an INSERT statement that Cutline wrote")
        begin = found.end()
        return found

    while begin < len(statements):
        yield take(INSERT)
        yield take(ROW)
        while statements.startswith(NEXT_ROW, begin):
            begin += len(NEXT_ROW)
            yield take(ROW)
        yield take(CONFLICT)
