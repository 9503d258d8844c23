"""Run a shard's DDL on a target, and collect the statements that the server refuses.

Each transaction creates up to OBJECTS_AT_ONCE objects, because a transaction holds a lock on every object until it
commits. If the server refuses an object, the transaction is repeated entry by entry, each in a savepoint, so that all
others are created. Indexes, keys and foreign keys that lock only their own tables are created by up to JOBS concurrent
sessions (restore/ddl/side_by_side.py). Another session may create some of them while rows are being loaded; all of
them could also be created after the rows.

Each transaction that runs a batch of entries records a mark in the database's ledger, plus a mark for each refused
entry. Indexes, keys and foreign keys created by concurrent sessions need no marks: each is a single statement, which
has succeeded if its object exists.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import psycopg
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import (
    TRANSACTION_TIMEOUT_VERSION,
    connect_with_path,
    database_name,
    disrupted_error,
    raising_unreachable,
)
from cutline.nodes.encodings import RAW, raw_bytes, raw_text
from cutline.nodes.open_sessions import CANCEL_SECONDS_MAX, shut_down
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import (
    DATABASE,
    EVENT_TRIGGERS,
    POST_DATA,
    PRE_DATA,
    ROWS,
    Ddl,
    DdlEntry,
    Refusal,
    SchemaLoadError,
    ending,
)
from cutline.restore.ddl.role_statements import DEFAULT_PRIVILEGES
from cutline.restore.ddl.session_settings import set_settings, settings_for_ddl
from cutline.restore.ddl.side_by_side import BuiltObject, EntryQueue, find_early, object_of, tables_in
from cutline.restore.ddl.statements import STORED_QUERY, NeededPath, run_statements, run_with_paths, statements_of
from cutline.snapshots.ddl.database_facts import DEFAULT
from cutline.snapshots.ddl.ddl_archive import EXTENSION, PRIVILEGES
from cutline.storage.errors import SnapshotError

DIGEST_SHOWN = 16
# A key may be long.
DETAIL_SHOWN_MAX = 200
REFUSED = "refused"
# Marks are ASCII, so a session can read them in any encoding.
MARKS_QUERY = "SELECT convert_to(task, 'UTF8') FROM {ledger} WHERE starts_with(task, '{section} ')"
# Schema, table and name: an archive names an index without its table. Servers from 18 on name NOT NULL constraints
# themselves, and a key of the snapshot may have such a name.
EXISTING_QUERY = """
SELECT namesend(n.nspname), ''::bytea, namesend(c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('i', 'I')
UNION ALL
SELECT namesend(n.nspname), namesend(c.relname), namesend(o.conname)
  FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE o.contype IN ('p', 'u', 'x', 'f')
"""
# Names of tables from text in UTF-8, in a session of any encoding.
TABLES_QUERY = b"""
SELECT g.number, pg_catalog.namesend(n.nspname), pg_catalog.namesend(c.relname)
  FROM pg_catalog.unnest(%s::bytea[]) WITH ORDINALITY AS g (name, number)
  JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.convert_from(g.name, 'UTF8')::pg_catalog.regclass
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
"""
SIZES_QUERY = """
SELECT namesend(n.nspname), namesend(c.relname), pg_relation_size(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""


def name_marks(section: str, batches: Iterable[bytes]) -> list[str]:
    """Return the name of each batch's mark, which consists of the batch's number and a digest of its statements."""
    return [
        f"{section} {number} {hashlib.sha256(batch).hexdigest()[:DIGEST_SHOWN]}" for number, batch in enumerate(batches)
    ]


def read_marks(connection: psycopg.Connection[Any], ledger: str, section: str, names: Iterable[str]) -> set[str]:
    """Read a section's marks from the ledger; raise SchemaLoadError if a mark is not among `names`."""
    query = MARKS_QUERY.format(ledger=ledger, section=section)
    marks = {raw_text(bytes(task)) for (task,) in connection.execute(query.encode())}
    if not marks <= set(names):
        raise SchemaLoadError(
            f"the {section} DDL has changed since the restore began: either the target's roles have changed, or the"
            " restore began with different PostgreSQL programs",
            hint="resume it as the same role, on the same machine, with the roles that the target had then; or undo it",
        )
    return marks


def refused_mark(section: str, entry: DdlEntry) -> str:
    """Return the name of a refused entry's mark."""
    return f"{REFUSED} {section} {hashlib.sha256(raw_bytes(entry.statements)).hexdigest()[:DIGEST_SHOWN]}"


def read_refused(connection: psycopg.Connection[Any], ledger: str) -> set[str]:
    """Read the marks of refused entries from the ledger."""
    query = MARKS_QUERY.format(ledger=ledger, section=REFUSED)
    return {raw_text(bytes(task)) for (task,) in connection.execute(query.encode())}


def remove_refused(ledger: str, name: str) -> str:
    """Return the statement that removes a refused entry's mark."""
    return f"DELETE FROM {ledger} WHERE task = '{name}';"


def read_existing(connection: psycopg.Connection[Any]) -> set[BuiltObject]:
    """Read the indexes and constraints in the database."""
    rows = connection.execute(EXISTING_QUERY).fetchall()
    return {BuiltObject(*(raw_text(bytes(cell)) for cell in row)) for row in rows}


def read_table_sizes(connection: psycopg.Connection[Any]) -> dict[tuple[str, str], int]:
    """Read the sizes of the database's tables in bytes, keyed by schema and name (raw text)."""
    rows = connection.execute(SIZES_QUERY).fetchall()
    return {(raw_text(bytes(schema)), raw_text(bytes(name))): size for schema, name, size in rows}


def mark(ledger: str, name: str) -> str:
    """Return the statement that records a mark unless it exists."""
    return f"INSERT INTO {ledger} VALUES ('{name}', 0, 0) ON CONFLICT DO NOTHING;"


def drop_statement(ledger: str) -> str:
    """Return the statement that drops the ledger and its schema."""
    return f"DROP SCHEMA {ledger.partition('.')[0]} CASCADE;"


OBJECTS_AT_ONCE, TEXT_MAX = 200, 1 << 20
JOBS = 4
# 128 MB for each of the JOBS sessions, or more if the server is configured for more.
SETTINGS_QUERY = b"""
SELECT pg_catalog.set_config('synchronous_commit', 'off', false),
       pg_catalog.set_config('maintenance_work_mem', greatest(setting::bigint, 131072)::text, false)
  FROM pg_catalog.pg_settings WHERE name = 'maintenance_work_mem'
"""
EMPTY = "''"
PINNED_PATH = PINNED_SETTINGS["search_path"]
# An extension's script may change the session's search_path, as postgis_topology does.
AFTER_EXTENSION = "SELECT pg_catalog.set_config('search_path', '', false);\n"
# Entries in archives have lower numbers.
DATABASE_NUMBER = 1 << 40
# pg_dump 18 writes this regardless of the server's version.
TRANSACTION_TIMEOUT = "SET transaction_timeout = 0;"
# privilege_not_granted and privilege_not_revoked: if a GRANT or REVOKE has no effect, the server only warns.
NOT_GRANTED = ("01007", "01006")
# How often an early session looks for tables that have all their rows, and the most of its time that this may take.
EARLY_SECONDS, EARLY_SHARE = 1.0, 0.05
END_AGAIN_SECONDS = 0.5
EARLIER = "the server refused it in an earlier process of this restore"
# Records that a database is finished, and its refused entries, in a session in that database.
RecordFinished: TypeAlias = Callable[[psycopg.Connection[Any], list[Refusal]], None]


class EarlyBuild(Struct):
    """The work of a session that creates indexes and keys while rows are loaded, all of which are in `queue`.

    `ended` is set when it is to take no more of them. `session` is None unless it is open.
    """

    queue: EntryQueue
    ended: threading.Event = field(default_factory=threading.Event)
    work: Future[None] = field(default_factory=Future)
    session: psycopg.Connection[Any] | None = None


class DdlRun(Struct):
    """Runs a shard's DDL in the database of `node`.

    `sessions_max` is the maximum number of sessions that create indexes and keys concurrently. `refusals` are keyed by
    entry number. `helped` contains each entry that could be created only after its functions were given a temporary
    search_path, paired with those functions. If `is_strict`, a grant that has no effect counts as refused.
    """

    node: Node
    ddl: Ddl
    watch: Watch
    is_strict: bool = False
    sessions_max: int = JOBS
    refusals: dict[int, Refusal] = field(default_factory=dict)
    helped: list[tuple[DdlEntry, tuple[NeededPath, ...]]] = field(default_factory=list)
    _early: EarlyBuild | None = None

    @property
    def all_refused(self) -> list[Refusal]:
        """The entries whose statements are missing from the store, and the refusals."""
        return [*self.ddl.lost, *self.refusals.values()]

    def before_rows(self) -> None:
        """Create the objects that the rows need.

        Like all methods that run DDL, raises NodeUnreachableError if a session is lost or a statement is terminated.
        """
        numbers = [number for number, entry in enumerate(self.ddl.pre_data, 1) if entry.kind == EXTENSION]
        first = max(numbers, default=0)
        # Extension scripts read the session's initial search_path and append to it.
        for entries, path in ((self.ddl.pre_data[:first], DEFAULT), (self.ddl.pre_data[first:], PINNED_PATH)):
            if entries:
                with self._session(path) as connection:
                    for chunk in chunks_of(entries):
                        self._run_chunk(connection, PRE_DATA, chunk)
                    self._try_refused_again(connection)
                    if any(entry.kind == EXTENSION for entry in entries):
                        reset_settings(connection, self.node)

    def after_rows(self, ledger: str = "") -> None:
        """Create the objects that follow the rows, except event triggers, without refreshing views.

        With a `ledger`, skips objects that an earlier process created, and retries the statements that were refused
        then.
        """
        parallel = self.ddl.side_by_side
        rest = list(chunks_of([entry for entry in self.ddl.post_data if entry.number not in parallel]))
        texts = ("".join(entry.statements for entry in chunk) for chunk in rest)
        names = name_marks(POST_DATA, map(raw_bytes, texts))
        with self._computing() as connection:
            done = read_marks(connection, ledger, POST_DATA, names) if ledger else set[str]()
            refused_before = read_refused(connection, ledger) if ledger else set[str]()
            sizes = read_table_sizes(connection)
            queue = self._early.queue if self._early else self._queue_missing(connection, sizes)
            if done.isdisjoint(names):
                self._grant_early(connection)
        queue.release_all(sizes)
        self._run_side_by_side(queue)
        with self._computing() as connection:
            for name, chunk in zip(names, rest, strict=True):
                if name not in done:
                    self._run_chunk(connection, POST_DATA, chunk, ledger, name)
                    continue
                for entry in chunk:
                    if refused_mark(POST_DATA, entry) in refused_before:
                        self._run_again(connection, entry, ledger)

    def _grant_early(self, connection: psycopg.Connection[Any]) -> None:
        """Grant what indexes may need, before they are created; what is refused is refused once more, and reported."""
        for statement in self.ddl.early_grants:
            try:
                with connection.transaction():
                    run_statements(connection, raw_bytes(statement))
            except psycopg.Error:
                if connection.broken:
                    raise

    def begin_early(
        self,
        tables: Mapping[int, str],
        rows: Mapping[int, int],
        find_complete: Callable[[psycopg.Connection[Any]], Iterable[int]],
    ) -> None:
        """Begin to create early entries (restore/ddl/side_by_side.py) in a thread, those of the largest tables first.

        `tables` are the tables that are being loaded, as SQL, keyed by group number, with their approximate number of
        `rows`. `find_complete` is called about once a second, with the thread's session, and returns the groups that
        have all their rows since the last call. Does nothing if no session can be opened. `stop_early` or `end_early`
        must follow; everything that is missing then is created by `after_rows`.
        """
        early_entries = find_early(self.ddl)
        if not early_entries:
            return
        groups, before = list(tables), tables_in(self.ddl)
        try:
            with self._computing() as connection:
                found = connection.execute(TABLES_QUERY, ([tables[group].encode() for group in groups],)).fetchall()
                names = {(raw_text(bytes(one)), raw_text(bytes(name))): groups[n - 1] for n, one, name in found}
                sizes = {name: rows.get(group, 0) for name, group in names.items()}
                queue = self._queue_missing(connection, sizes, held=True)
        except (SnapshotError, psycopg.Error):
            return
        entries: dict[int, list[int]] = {}
        for number, table in early_entries.items():
            if (group := names.get((before[table].schema, before[table].name))) is not None:
                entries.setdefault(group, []).append(number)

        def find_ready(connection: psycopg.Connection[Any]) -> list[int]:
            return [number for group in find_complete(connection) for number in entries.get(group, ())]

        self._early = early = EarlyBuild(queue)
        threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="early indexes")
        early.work = threads.submit(self._build_early, early, find_ready)
        threads.shutdown(wait=False)

    def stop_early(self) -> None:
        """Begin no more early entries; a statement that is running continues while the next step runs."""
        if self._early is not None:
            self._early.ended.set()

    def end_early(self) -> None:
        """End the thread of `begin_early`, if it still runs, together with the statement in its session."""
        if (early := self._early) is None:
            return
        early.ended.set()
        while not early.work.done():
            if (session := early.session) is not None:
                # Without the request, the server would finish the statement before it notices that its client is gone.
                with suppress(psycopg.Error):
                    session.cancel_safe(timeout=CANCEL_SECONDS_MAX)
                shut_down(session)
            wait([early.work], timeout=END_AGAIN_SECONDS)

    def _build_early(self, early: EarlyBuild, find_ready: Callable[[psycopg.Connection[Any]], Iterable[int]]) -> None:
        due, settings = 0.0, ""
        try:
            with self._computing() as early.session:
                while not early.ended.is_set():
                    if (began := time.monotonic()) >= due:
                        early.queue.release(find_ready(early.session))
                        now = time.monotonic()
                        due = now + max(EARLY_SECONDS, (now - began) / EARLY_SHARE)
                    if (entry := early.queue.take_ready()) is not None:
                        settings = self._create(early.session, early.queue, entry, settings)
                    else:
                        early.ended.wait(max(due - time.monotonic(), 0.0))
        except (SnapshotError, psycopg.Error):
            # A session that is lost between statements has left nothing undone. During one, the server may still be
            # running it.
            if early.queue.is_stopped:
                raise

    def note_refused(self, connection: psycopg.Connection[Any], ledger: str) -> None:
        """Read from the ledger which entries were refused before the rows in an earlier process."""
        refused = read_refused(connection, ledger)
        for entry in self.ddl.pre_data:
            if refused_mark(PRE_DATA, entry) in refused:
                self.refusals[entry.number] = Refusal(entry, PRE_DATA, EARLIER, entry.statements)

    def mark_refused(self, connection: psycopg.Connection[Any], ledger: str) -> None:
        """Record in the ledger which entries were refused before the rows."""
        marks = (mark(ledger, refused_mark(PRE_DATA, refusal.entry)) for refusal in self.refusals.values())
        run_statements(connection, "".join(marks).encode())

    def last(
        self, ledger: str, first: str = "", *, allows_refused: bool = False, record: RecordFinished | None = None
    ) -> bool:
        """In one transaction, run `first`, drop the ledger, create event triggers and alter the database.

        Rolls everything back if any entry is refused, unless `allows_refused` is set. `record` is called before the
        commit, and must record that the database is finished: from then on it may let nobody in. Returns whether the
        transaction was committed. Raises SchemaLoadError if the server refuses `first` or the drop of the ledger.
        """
        with self._session() as connection, connection.transaction() as transaction:
            try:
                # Run these before event triggers exist, because the triggers would fire for them.
                run_statements(connection, raw_bytes(first + drop_statement(ledger)))
            except psycopg.Error as error:
                if connection.broken:
                    raise
                if remedy_of(error):
                    raise disrupted_error(self.node.id, error) from error
                raise SchemaLoadError(
                    f"node {self.node.id}: tables can't be renamed: {shorten_message(error)}",
                    hint="rename or drop the objects that have these names in the database, then repeat the command",
                    details={"node": self.node.id},
                ) from error
            for entry in self.ddl.event_triggers:
                self._try(connection, EVENT_TRIGGERS, entry)
            self._run_of_database(connection)
            if is_undone := bool(self.refusals) and not allows_refused:
                raise psycopg.Rollback(transaction)
            if record is not None:
                record(connection, self.all_refused)
        return not is_undone

    def all_sections(self) -> None:
        """Run all sections in the empty database, to find the refusals."""
        self.before_rows()
        self.after_rows()
        with self._session() as connection:
            for entry in self.ddl.event_triggers:
                self._try(connection, EVENT_TRIGGERS, entry)
            with connection.transaction(force_rollback=True):
                self._run_of_database(connection)

    def _run_of_database(self, connection: psycopg.Connection[Any]) -> None:
        """Apply the database's settings and privileges; refusals name the database by its real name."""
        if self.ddl.database is None:
            return
        shown = self.ddl.database.pieces(self.ddl.database.name)
        pieces = self.ddl.database.pieces(database_name(self.node.dsn))
        for number, (piece, named) in enumerate(zip(pieces, shown, strict=True), DATABASE_NUMBER):
            shown_text = "\n".join(named.statements)
            entry = DdlEntry(number, piece.kind, "", piece.name, shown_text)
            try:
                text = _stored_text(connection, "\n".join(piece.statements))
                named_text = _stored_text(connection, shown_text)
            except psycopg.DataError as error:
                self.refusals[number] = Refusal(entry, DATABASE, shorten_message(error), shown_text)
                continue
            if refusal := self._try(connection, DATABASE, replace(entry, statements=text)):
                named_entry = replace(entry, statements=named_text)
                self.refusals[number] = replace(refusal, entry=named_entry, statement=shown_text)

    @contextmanager
    def _session(self, path: str = PINNED_PATH) -> Iterator[psycopg.Connection[Any]]:
        """Open a session for statements, with the initial search_path `path`.

        The session uses the encoding RAW from the start, so that each server message is converted as a whole.
        """
        with (
            raising_unreachable(self.node),
            connect_with_path(self.node, path, client_encoding=RAW) as connection,
            ending(self.watch, connection),
        ):
            connection.execute(SETTINGS_QUERY)
            has_timeout = connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION
            settings = (statement for statement in statements_of(self.ddl.settings) if statement.bare)
            texts = (setting.bare for setting in settings if has_timeout or setting.bare != TRANSACTION_TIMEOUT)
            run_statements(connection, raw_bytes("\n".join(texts)))
            yield connection

    @contextmanager
    def _computing(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a session in which the server computes values from rows, such as the keys of indexes."""
        with self._session() as connection:
            set_settings(connection, settings_for_ddl(self.ddl.session_settings))
            yield connection

    def _run_chunk(
        self,
        connection: psycopg.Connection[Any],
        section: str,
        chunk: Sequence[DdlEntry],
        ledger: str = "",
        name: str = "",
    ) -> None:
        """Run the entries in one transaction that records the mark `name` in the ledger; record refused entries."""
        done = mark(ledger, name).encode() if ledger else b""
        is_judged = self.is_strict and any(ddl_entry.kind in (PRIVILEGES, DEFAULT_PRIVILEGES) for ddl_entry in chunk)
        if not is_judged and all(self.refusals.keys().isdisjoint(ddl_entry.dependencies) for ddl_entry in chunk):
            try:
                run_statements(connection, message_of(chunk) + done)
            except psycopg.Error:
                if connection.broken:
                    raise
            else:
                return
        with connection.transaction():
            refused = [entry for entry in chunk if self._try(connection, section, entry) is not None]
            marks = (mark(ledger, refused_mark(section, entry)).encode() for entry in refused if ledger)
            run_statements(connection, b"".join(marks) + done)

    def _try_refused_again(self, connection: psycopg.Connection[Any]) -> None:
        """Retry statements refused before the rows until no more succeed, because pg_dump breaks dependency loops."""
        refused: dict[int, Refusal] = {}
        while len(self.refusals) != len(refused):
            refused, self.refusals = self.refusals, {}
            for refusal in refused.values():
                with connection.transaction():
                    self._try(connection, PRE_DATA, refusal.entry)

    def _run_again(self, connection: psycopg.Connection[Any], entry: DdlEntry, ledger: str) -> None:
        """Retry a refused entry; remove its mark if it succeeds."""
        with connection.transaction():
            if self._try(connection, POST_DATA, entry) is None:
                run_statements(connection, remove_refused(ledger, refused_mark(POST_DATA, entry)).encode())

    def _try(self, connection: psycopg.Connection[Any], section: str, entry: DdlEntry) -> Refusal | None:
        """Run one entry in a transaction or a savepoint; record and return its refusal, if any."""
        needed = next(
            (self.refusals[dependency] for dependency in entry.dependencies if dependency in self.refusals), None
        )
        if needed is not None:
            reason = f"it needs {needed.label}, which was refused"
            refusal = Refusal(entry, section, reason, "", needed.sqlstate, needed.needs or needed.label)
        elif found := self._find_refusal(connection, section, entry):
            refusal = found
        else:
            return None
        self.refusals[entry.number] = refusal
        return refusal

    def _find_refusal(self, connection: psycopg.Connection[Any], section: str, entry: DdlEntry) -> Refusal | None:
        if self.is_strict and entry.kind in (PRIVILEGES, DEFAULT_PRIVILEGES):
            return self._find_idle_grant(connection, section, entry)
        try:
            needed = run_with_paths(connection, message_of([entry]), self.ddl.search_path)
            if needed is not None:
                self.helped.append((entry, needed))
        except psycopg.Error as error:
            if connection.broken:
                raise
            if remedy_of(error):
                raise disrupted_error(self.node.id, error, entry.label) from error
            statement = _find_refused(connection, entry)
            return Refusal(entry, section, _reason(entry, error), statement, error.diag.sqlstate or "")
        return None

    def _find_idle_grant(self, connection: psycopg.Connection[Any], section: str, entry: DdlEntry) -> Refusal | None:
        """Run an entry's statements about privileges; return a refusal if one is refused or has no effect."""
        # Copy the fields: a Diagnostic can be read only in the handler; afterwards all its fields are None.
        warnings: list[tuple[str, str]] = []

        def note(warning: psycopg.errors.Diagnostic) -> None:
            if warning.sqlstate in NOT_GRANTED:
                warnings.append((str(warning.message_primary), str(warning.sqlstate)))

        refusal: Refusal | None = None
        connection.add_notice_handler(note)
        try:
            for statement, error in _run_each(connection, entry):
                if error is not None and remedy_of(error):
                    raise disrupted_error(self.node.id, error, entry.label) from error
                errors = [(shorten_message(error), error.diag.sqlstate or "")] if error is not None else []
                for reason, sqlstate in (*errors, *warnings):
                    refusal = refusal or Refusal(entry, section, reason, statement, sqlstate)
                warnings.clear()
        finally:
            connection.remove_notice_handler(note)
        return refusal

    def _queue_missing(
        self, connection: psycopg.Connection[Any], sizes: Mapping[tuple[str, str], int], *, held: bool = False
    ) -> EntryQueue:
        """Return a queue of all entries that may run side by side and whose objects don't exist."""
        existing, tables = read_existing(connection), tables_in(self.ddl)
        long = (entry for entry in self.ddl.post_data if entry.number in self.ddl.side_by_side)
        missing = [entry for entry in long if object_of(entry, tables) not in existing]
        return EntryQueue(missing, tables, sizes, held=held)

    def _run_side_by_side(self, queue: EntryQueue) -> None:
        """Create the entries in several sessions, in addition to the early one; then retry refused entries.

        The retry runs one entry at a time, because a concurrent session may have caused the refusal, and gives
        functions a search_path.
        """
        if queue:
            sessions = self.sessions_max
            if self._early is not None and not self._early.work.done():
                sessions -= 1
            jobs = max(min(sessions, JOBS, len(queue)), 1)

            def work(_job: int) -> None:
                settings = ""
                with queue.stopping(), self._computing() as connection:
                    for entry in queue:
                        settings = self._create(connection, queue, entry, settings)

            in_parallel(work, range(jobs))
        if self._early is not None:
            self._early.work.result()
        if refused := queue.refused:
            with self._computing() as connection:
                for entry in refused:
                    self._try(connection, POST_DATA, entry)

    def _create(self, connection: psycopg.Connection[Any], queue: EntryQueue, entry: DdlEntry, settings: str) -> str:
        """Create an entry from the queue in a session that has these settings; return the session's settings."""
        with queue.stopping():
            if (wanted := session_settings(entry)) != settings:
                run_statements(connection, raw_bytes(wanted))
            # Send the statement alone, because the server's views show a session's whole message.
            *_, statement = _bare_statements(entry)
            try:
                run_statements(connection, raw_bytes(statement))
            except psycopg.Error:
                if connection.broken:
                    raise
                queue.end(entry, is_refused=True)
            else:
                queue.end(entry, is_refused=False)
        return wanted


def _reason(entry: DdlEntry, error: psycopg.Error) -> str:
    """Return the server's message, with the key that violates a constraint.

    For rows of extensions' tables, the values are omitted, because they may be secret.
    """
    if entry.kind == ROWS and isinstance(error, psycopg.DataError):
        return f"a value is not valid for its column ({type(error).__name__})"
    detail = (error.diag.message_detail or "")[:DETAIL_SHOWN_MAX]
    is_of_key = isinstance(error, psycopg.IntegrityError) and entry.kind != ROWS and detail
    return f"{shorten_message(error)}: {' '.join(detail.split())}" if is_of_key else shorten_message(error)


def _stored_text(connection: psycopg.Connection[Any], text: str) -> str:
    """Convert text to raw text in the encoding of the session's database; raise psycopg.DataError if that fails."""
    if text.isascii():
        return text
    with connection.transaction():
        ((body,),) = connection.execute(STORED_QUERY, ([text.encode()],)).fetchall()
    return raw_text(bytes(body))


def reset_settings(connection: psycopg.Connection[Any], database: Node) -> None:
    """Reset the settings of a raw session's database that extension scripts, such as postgis_topology's, changed."""
    text = f"ALTER DATABASE {quote_identifier(database_name(database.dsn))} RESET ALL"
    run_statements(connection, raw_bytes(_stored_text(connection, text)))


def chunks_of(entries: Iterable[DdlEntry]) -> Iterator[list[DdlEntry]]:
    """Divide the entries into chunks, one for each transaction."""
    chunk: list[DdlEntry] = []
    size = 0
    for entry in entries:
        if chunk and (len(chunk) >= OBJECTS_AT_ONCE or size + len(entry.statements) > TEXT_MAX):
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += len(entry.statements)
    if chunk:
        yield chunk


def message_of(entries: Iterable[DdlEntry]) -> bytes:
    """Join the statements of the entries, each with its settings, into one message for the server."""
    pieces: list[str] = []
    before = ""
    for entry in entries:
        if (settings := session_settings(entry)) != before:
            pieces.append(settings)
            before = settings
        pieces.append(f"{entry.statements}\n")
        if entry.kind == EXTENSION:
            pieces.append(AFTER_EXTENSION)
    return raw_bytes("".join(pieces))


def session_settings(entry: DdlEntry) -> str:
    """Return the statements that set the session up for the entry."""
    tablespace = quote_identifier(entry.tablespace) if entry.tablespace else EMPTY
    access = f"SET default_table_access_method = {quote_identifier(entry.access)};\n" if entry.access else ""
    return f"SET default_tablespace = {tablespace};\n{access}"


def _find_refused(connection: psycopg.Connection[Any], entry: DdlEntry) -> str:
    """Find the entry's statement that the server refuses; return all statements if each is accepted individually."""
    statements = _bare_statements(entry)
    if len(statements) == 1:
        return statements[0]
    with connection.transaction(force_rollback=True):
        for statement, error in _run_each(connection, entry):
            if error is not None:
                return statement
    return "\n".join(statements)


def _run_each(connection: psycopg.Connection[Any], entry: DdlEntry) -> Iterator[tuple[str, psycopg.Error | None]]:
    """Run an entry's statements, each in a transaction or a savepoint; yield each with the error that refuses it.

    Raises the error if the session is lost.
    """
    for statement in _bare_statements(entry):
        refused: psycopg.Error | None = None
        try:
            with connection.transaction():
                run_statements(connection, raw_bytes(statement))
        except psycopg.Error as error:
            if connection.broken:
                raise
            refused = error
        yield statement, refused


def _bare_statements(entry: DdlEntry) -> list[str]:
    return [statement.bare for statement in statements_of(entry.statements) if statement.bare]
