"""Running a case on two real shards: a full snapshot, increments, all of them restored, and compared with the source.

There is no model of what rows there should be. While nobody writes, right before an increment, the source is read by
PostgreSQL's own COPY, sorted by PostgreSQL; what is restored must give the same bytes.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fleet.config import Fleet
from fleet.connections import with_database
from fleet.postgres_wheel import run_tool
from fleet.progress import Silent
from snapshots.create import CreateRequest
from snapshots.increment import create_increment
from storage.errors import RefusedError, SnapshotError
from tests.fuzz.schemas import APPEND_ONLY_PATTERN
from tests.fuzz.script import Case
from tests.fuzz.servers import Shards
from tests.snapshot_runs import Ready, Runs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS = 10.0
REPLAY_SECONDS_MAX = 60.0
SOURCE, BACK, NAME = "fuzz", "fuzz_back", "fuzzed"
# The judge's own session, whatever the database is set to.
JUDGE = {
    "datestyle": "ISO", "intervalstyle": "postgres", "timezone": "UTC", "bytea_output": "hex",
    "extra_float_digits": "1", "search_path": "pg_catalog", "lock_timeout": "20s",
    "xmloption": "content",
}  # fmt: skip
# The columns by name: pg_dump gives those that a heir has from its parent their place before the heir's own.
TABLES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname), coalesce(string_agg(quote_ident(a.attname), ', ' ORDER BY a.attname), '')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relkind = 'r' AND n.nspname !~ '^(pg_|information_schema)' GROUP BY 1, c.oid ORDER BY 1
"""
SEQUENCES_QUERY = """
SELECT n.nspname || '.' || c.relname, pg_sequence_last_value(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S' ORDER BY 1
"""
# A detached partition keeps the names of its parent's constraints, and pg_dump names those alone: where its script is
# run, PostgreSQL finds them taken when it names the parent's.
NOT_NULL_NAME = re.compile(r' CONSTRAINT (?:"(?:[^"]|"")*"|\w+) NOT NULL')
DROP_SLOTS_QUERY = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
 WHERE slot_name LIKE 'cutline%%' AND database = %s
"""
WITHOUT_IDENTITY_QUERY = """
SELECT format('ALTER TABLE %I.%I REPLICA IDENTITY FULL', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema)' AND c.relreplident <> 'f'
   AND c.relname !~ '^log'
   AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident)))
"""
COMPUTED_QUERY = """
SELECT format('ALTER TABLE %I.%I DROP COLUMN %I CASCADE', n.nspname, c.relname, a.attname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE c.relkind = 'r' AND c.relreplident = 'f' AND a.attgenerated <> '' AND NOT a.attisdropped
"""


class FoundError(AssertionError):
    """A case that Cutline does not get right."""


@dataclass(frozen=True, slots=True)
class State:
    """What one shard is: its tables' sorted rows, its sequences, its definitions as pg_dump has them."""

    rows: Mapping[str, bytes]
    sequences: Mapping[str, int | None]
    definitions: str


@dataclass(slots=True)
class Figures:
    """What was run."""

    cases: int = 0
    transactions: int = 0
    statements: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    unmade: list[str] = field(default_factory=list)
    increments: int = 0
    refusals: int = 0
    restored: int = 0
    rows: int = 0
    checked: int = 0
    seconds: float = 0.0

    def add(self, shards: Shards) -> None:
        self.transactions += shards.transactions
        self.statements += shards.statements
        for state, count in shards.refused.items():
            self.refused[state] = self.refused.get(state, 0) + count

    def __str__(self) -> str:
        refused = sum(self.refused.values())
        return (
            f"{self.cases} cases, {self.transactions} transactions, {self.statements} statements ({refused} of them "
            f"refused by PostgreSQL), {self.increments} increments ({self.refusals} after a refusal); "
            f"{self.restored} states restored with {self.rows} rows, {self.checked} checked; {self.seconds:.0f} s"
        )


@dataclass(slots=True)
class Ground:
    """Two shards to run cases on, one after the other, each in databases and a store of its own."""

    fleet: Fleet
    spark: SparkSession
    directory: Path
    figures: Figures = field(default_factory=Figures)

    def run(self, case: Case) -> None:
        """Run one case; raise FoundError where what comes back is not what was there, or does not come back."""
        began = time.monotonic()
        store = self.directory / "store"
        shutil.rmtree(store, ignore_errors=True)
        rules = replace(self.fleet.groups, append_only=(APPEND_ONLY_PATTERN,))
        source = _in_database(replace(self.fleet, store_url=f"file://{store}", groups=rules), SOURCE)
        self.clear()
        for node in source.primaries:
            _create_database(with_database(node, "postgres").dsn, case.options)
        for node in source.nodes:
            _await_database(node.dsn)
        try:
            with told("case"):
                Run(case, Runs(source, Ready(self.spark)), _in_database(self.fleet, BACK), self.figures).whole()
        finally:
            self.clear()
            self.figures.cases += 1
            self.figures.seconds += time.monotonic() - began

    def clear(self) -> None:
        """Drop what cases leave on the servers."""
        for node in self.fleet.nodes:
            with suppress(psycopg.OperationalError):
                _drop_slots(with_database(node, "postgres").dsn)
        for node in self.fleet.primaries:
            _drop_databases(with_database(node, "postgres").dsn, with_database(node, SOURCE).dsn)


@dataclass(slots=True)
class Run:
    """One case under way."""

    case: Case
    runs: Runs
    target: Fleet
    figures: Figures
    states: list[list[State]] = field(default_factory=list)

    def whole(self) -> None:
        with Shards([node.dsn for node in self.runs.fleet.primaries]) as shards:
            try:
                for on, statement in self.case.setup:
                    for shard in on:
                        if not shards.attempt(shard, statement):
                            self.figures.unmade.append(f"{shards.answer}: {statement}")
                self.runs.init()
                shards.interval(self.case.intervals[0])
                shards.end_all()
                self.take(shards)
                for transactions in self.case.intervals[1:]:
                    shards.interval(transactions)
                    self.take(shards)
                shards.end_all()
            finally:
                self.figures.add(shards)
        for number in self.judged():
            self.judge(number)

    def judged(self) -> list[int]:
        """The last state first; restoring is most of what a case costs, and the last has the most behind it."""
        every = [*reversed(range(len(self.states)))]
        return every[:1] if self.case.options.get("judge") == "last" else every

    def take(self, shards: Shards) -> None:
        """A full snapshot, or an increment; nobody writes meanwhile but what is ended right after it."""
        number = len(self.states)
        with told(f"create of increment {number}"):
            if not number:
                self.runs.full(NAME)
            else:
                try:
                    self.increment()
                except RefusedError as error:
                    if not self.mended(shards, error):
                        raise
                    self.figures.refusals += 1
                    self.increment()
                self.figures.increments += 1
        shards.close_halves()
        self.states.append([state_of(node.dsn) for node in self.runs.fleet.primaries])

    def increment(self) -> None:
        request = CreateRequest(NAME, wait_seconds=WAIT_SECONDS)
        create_increment(self.runs.fleet, request, self.runs.spark, Silent())

    def mended(self, shards: Shards, error: RefusedError) -> bool:
        """Whether it was right to refuse, by what the servers say: what stood in the way is then away."""
        if "prepared" in str(error) and (shards.held or shards.closing):
            shards.end_all()
            return True
        remedies = [(dsn, remedy) for dsn in shards.dsns for remedy in remedies_of(dsn)]
        for dsn, remedy in remedies:
            with psycopg.connect(judging(dsn), autocommit=True) as connection:
                connection.execute(remedy)
        return bool(remedies)

    def judge(self, number: int) -> None:
        for node in self.target.primaries:
            _drop_databases(with_database(node, "postgres").dsn, None)
        with told(f"restore of increment {number}"):
            self.runs.restore(NAME, self.target, number)
        self.figures.restored += 1
        for node, expected in zip(self.target.primaries, self.states[number], strict=True):
            compare(expected, state_of(node.dsn), f"increment {number}, {node.id}")
            self.figures.rows += sum(text.count(b"\n") for text in expected.rows.values())
        if self.case.options.get("check") == "yes":
            with told(f"check of increment {number}"):
                report = self.runs.check_one(NAME, number)
            wanted = "valid" if len(self.runs.fleet.nodes) > len(self.runs.fleet.primaries) else "inconclusive"
            if (report.result, report.conflicts) != (wanted, []):
                raise FoundError(f"check of increment {number}: {report}")
            self.figures.checked += 1


def remedies_of(dsn: str) -> list[str]:
    """What lets the updates of all tables be followed, by the catalogs; nothing if they can be."""
    with psycopg.connect(judging(dsn)) as connection:
        return [row[0] for query in (WITHOUT_IDENTITY_QUERY, COMPUTED_QUERY) for row in connection.execute(query)]


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise what Cutline raises as FoundError, saying at what."""
    try:
        yield
    except FoundError:
        raise
    except Exception as error:
        hint = error.hint if isinstance(error, SnapshotError) else ""
        raise FoundError(f"{what}: {type(error).__name__}: {error}\n{hint}") from error


def state_of(dsn: str) -> State:
    """A database's state; nobody may write meanwhile."""
    judge = judging(dsn)
    with psycopg.connect(judge) as connection:
        sequences = dict(connection.execute(SEQUENCES_QUERY).fetchall())
        rows = {table: _copied(connection, table, columns) for table, columns in connection.execute(TABLES_QUERY)}
    return State(rows, sequences, definitions_of(dsn))


def _copied(connection: psycopg.Connection[Any], table: str, columns: str) -> bytes:
    """A table's own rows as PostgreSQL prints and sorts them."""
    query = f'COPY (SELECT {columns} FROM ONLY {table} ORDER BY ROW({columns})::text COLLATE "C") TO STDOUT'
    with connection.cursor().copy(query) as copy:
        return b"".join(bytes(piece) for piece in copy)


def judging(dsn: str) -> str:
    """The same database, read with the judge's settings; of SQL_ASCII bytes are read as LATIN1 has them."""
    with psycopg.connect(dsn) as connection:
        is_ascii = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
    settings = JUDGE | {"client_encoding": "LATIN1" if is_ascii else "UTF8"}
    return make_conninfo(dsn, options=" ".join(f"-c {name}={value}" for name, value in settings.items()))


def definitions_of(dsn: str) -> str:
    """Everything but rows, as pg_dump writes it."""
    completed = run_tool(
        "pg_dump", "--dbname", dsn, "--schema-only", "--no-publications", "--restrict-key=fuzz",
        seconds_max=120,
    )  # fmt: skip
    return NOT_NULL_NAME.sub(" NOT NULL", completed.stdout)


def compare(expected: State, found: State, where: str) -> None:
    """Raise FoundError with the first difference."""
    _compare(expected.definitions.splitlines(), found.definitions.splitlines(), f"{where}: pg_dump")
    if found.rows.keys() != expected.rows.keys():
        raise FoundError(f"{where}: tables: {sorted(expected.rows)} became {sorted(found.rows)}")
    for table, text in expected.rows.items():
        _compare(text.split(b"\n"), found.rows[table].split(b"\n"), f"{where}: rows of {table}")
    for name, value in expected.sequences.items():
        if found.sequences.get(name) != value:
            raise FoundError(f"{where}: sequence {name}: {value} became {found.sequences.get(name)}")


def _compare(expected: list[Any], found: list[Any], what: str) -> None:
    if expected == found:
        return
    lost, new = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    shown = [f"- {line!r:.1500}" for line in lost] + [f"+ {line!r:.1500}" for line in new]
    told_first = f"{what}: {len(expected)} lines became {len(found)}"
    raise FoundError("\n".join([told_first, *(shown[:12] or ["in another order"])]))


def signature(error: BaseException) -> str:
    """What two failures have in common that are probably one fault."""
    first = str(error).partition("\n")[0]
    return re.sub(r'"[^"]*"|\b[\w.-]*\d[\w.-]*\b', "…", first)[:160]


def _in_database(fleet: Fleet, name: str) -> Fleet:
    return replace(fleet, nodes=tuple(with_database(node, name) for node in fleet.nodes))


def _create_database(dsn: str, options: Mapping[str, str]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        encoding = options.get("encoding", "UTF8")
        connection.execute(f"CREATE DATABASE {SOURCE} TEMPLATE template0 ENCODING '{encoding}'".encode())
        for name, value in options.items():
            if name.startswith("set "):
                setting = name.removeprefix("set ")
                connection.execute(f"ALTER DATABASE {SOURCE} SET {setting} = {value}".encode())


def _await_database(dsn: str) -> None:
    """A standby has it a moment later."""
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    while True:
        try:
            psycopg.connect(dsn).close()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _drop_slots(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(DROP_SLOTS_QUERY, (SOURCE,))


def _drop_databases(dsn: str, source: str | None) -> None:
    """Drop what was restored, and the source with what is prepared in it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = [row[0] for row in connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'fuzz%'")]
        for name in found:
            if name == SOURCE and source is None:
                continue
            if name == SOURCE:
                with psycopg.connect(judging(str(source)), autocommit=True) as inside:
                    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                    for (gid,) in inside.execute(query).fetchall():
                        inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
