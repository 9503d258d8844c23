"""One chain with tables of every kind: the state of its databases at every increment, and the restored states.

It has three shards: `s1` runs the wheel's PostgreSQL, with every type, statement and shape of table; `s2` runs the same
PostgreSQL, and its tables change their definitions; `s3` runs a different version, with every type of that version.
Cutline's role has every setting that changes how a value is printed or read.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.check.report import SnapshotReport
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import read_chain
from tests.chains.exact_databases import RULES, ExactDatabase, OtherVersionDatabase, run_schema_cases
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import roll_back_prepared
from tests.integration.wal_place import await_database
from tests.run.quick_spark import with_spark
from tests.run.soak import SEED, SOAK_SECONDS

NAME = "exact"
DATABASE, TARGET_DATABASE = "exact", "exact_back"
LAST = 4
# The increments to restore: the last one and a random earlier one; in the long form all of them.
RESTORED = tuple(range(LAST + 1)) if SOAK_SECONDS else (random.Random(SEED).randrange(LAST), LAST)
EXACT, REDEFINED, OTHER = "s1", "s2", "s3"
ROLE = "reader of 'odd' settings"
# Settings of the role that change how values are printed and read, or would end Cutline's sessions.
ROLE_SETTINGS = {
    "datestyle": "German, DMY", "intervalstyle": "sql_standard", "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-15", "bytea_output": "escape", "xmlbinary": "hex", "xmloption": "document",
    "lc_monetary": "C.utf8", "array_nulls": "off", "standard_conforming_strings": "off", "transform_null_equals": "on",
    "search_path": "types, own, public", "quote_all_identifiers": "on", "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on", "default_transaction_read_only": "on", "statement_timeout": "100ms",
    "lock_timeout": "1ms", "idle_in_transaction_session_timeout": "100ms", "idle_session_timeout": "100ms",
    "synchronize_seqscans": "on", "client_encoding": "LATIN1",
}  # fmt: skip
# Every state is read with each of these settings: values that are printed alike by one may differ by the other.
READERS = (
    {},
    {"datestyle": "SQL, DMY", "intervalstyle": "iso_8601", "timezone": "America/St_Johns", "extra_float_digits": "3",
     "bytea_output": "escape", "xmlbinary": "hex", "search_path": ""},
)  # fmt: skip
SEQUENCES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname), pg_sequence_last_value(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
"""
TEXT_BYTES_MAX = 20_000
DDL = ("--schema-only", "--no-publications", "--restrict-key=x")


@dataclass(frozen=True, slots=True)
class State:
    """A database as PostgreSQL prints it: the rows of its tables under each of READERS, its DDL, and its sequences."""

    rows: tuple[Mapping[str, bytes], ...]
    ddl: str
    sequences: Mapping[str, int | None]


def shorten(copies: Mapping[str, bytes]) -> dict[str, bytes]:
    """Replace large tables' rows by a digest: there are dozens of states, and some tables are many megabytes."""
    return {
        table: text if len(text) <= TEXT_BYTES_MAX else b"sha256 " + hashlib.sha256(text).digest()
        for table, text in copies.items()
    }


def state_of(dsn: str) -> State:
    found = []
    for settings in READERS:
        options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items())
        found.append(shorten(sorted_copies(make_conninfo(dsn, options=options))))
    with psycopg.connect(dsn) as connection:
        sequences = dict(connection.execute(SEQUENCES_QUERY).fetchall())
    return State(tuple(found), run_tool("pg_dump", "--dbname", dsn, *DDL, seconds_max=60).stdout, sequences)


@dataclass(slots=True)
class History:
    """The state of every shard at every increment, and the restored states of some increments."""

    runs: Runs
    databases: Mapping[str, str]
    exact: ExactDatabase
    versions: OtherVersionDatabase | None
    commits: list[Commit] = field(default_factory=list)
    states: list[Mapping[str, State]] = field(default_factory=list)
    restored: dict[int, Mapping[str, State]] = field(default_factory=dict)

    @property
    def target(self) -> Fleet:
        """The target of the restores: a second database on each server."""
        nodes = tuple(with_database(node, TARGET_DATABASE) for node in self.runs.fleet.primaries)
        return replace(self.runs.fleet, nodes=nodes)

    @property
    def chain(self) -> Chain:
        """Read the chain from the store."""
        return read_chain(self.runs.fleet.store.open(), NAME)

    def restored_dsn(self, shard: str) -> str:
        """Return the DSN of the restored database, for the tests' own role."""
        return make_conninfo(self.databases[shard], dbname=TARGET_DATABASE)

    def record_states(self) -> None:
        """Record the current state of the source."""
        self.states.append({shard: state_of(dsn) for shard, dsn in self.databases.items()})

    def restore(self, increment: int) -> None:
        """Restore an increment and record the restored state."""
        self.runs.restore(NAME, self.target, increment)
        self.restored[increment] = {shard: state_of(self.restored_dsn(shard)) for shard in self.databases}

    def check(self) -> SnapshotReport:
        return self.runs.check_one(NAME)

    def assert_same(self, shard: str, increment: int, *schemas: str) -> int:
        """Assert that the tables of these (or all) schemas were restored exactly; return their number."""
        count = 0
        prefixes = tuple(f"{schema}." for schema in schemas) or ("",)
        states = (self.states[increment][shard], self.restored[increment][shard])
        for was, found in zip(*(one.rows for one in states), strict=True):
            wanted = {table for table in was if table.startswith(prefixes)}
            assert wanted == {table for table in found if table.startswith(prefixes)}
            for table in sorted(wanted - RULES.not_copied):
                same = found[table] == was[table]
                assert same, f"{table} of {shard} at increment {increment}, {found[table][:500]!r} {was[table][:500]!r}"
            count = len(wanted)
        return count

    def changed_tables(self, schema: str, increment: int, shard: str = EXACT) -> set[str]:
        """Return the tables of the schema that the increment changed."""
        before, after = (self.states[number][shard].rows[0] for number in (increment - 1, increment))
        return {table for table in after if table.startswith(f"{schema}.") and before[table] != after[table]}


def differences(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Return the first differing lines; pytest's own diff of whole databases would take minutes and gigabytes."""
    lines = {"+": set(found) - set(expected), "-": set(expected) - set(found)}
    shown = [f"{sign} {line[:200]}" for sign, those in lines.items() for line in sorted(those)[:5]]
    if not shown and found != expected:
        number = next(n for n, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other)
        shown = [f"in another order from line {number}: {found[number][:200]!r} for {expected[number][:200]!r}"]
    return shown


class CrashError(Exception):
    """Ends a create."""


class CrashBeforeCommit(Silent):
    """Ends a create after its cut is made and all WAL is archived, before anything is committed."""

    def reached(self, point: str, *, node: str = "") -> None:
        if point == CrashPoint.SEQUENCES_READ:
            raise CrashError


@contextmanager
def exact_fleet(shards: Mapping[str, Sequence[EmbeddedNode]], folder: Path) -> Iterator[Fleet]:
    """Create ROLE and the databases on these servers, each shard's primary first; yield their fleet for ROLE."""
    lines = ['name = "exact"', f"store = {json.dumps(f'file://{folder}/store')}"]
    for shard, nodes in shards.items():
        for number, node in enumerate(nodes):
            dsn = make_conninfo(node.dsn("postgres"), dbname=DATABASE, user=ROLE)
            lines += ["", "[[node]]", f'id = "{shard}-b{number}"' if number else f'id = "{shard}"']
            lines += [f'backup_of = "{shard}"'] * bool(number) + [f"dsn = {json.dumps(dsn)}"]
    (folder / "fleet.toml").write_text("\n".join([*lines, with_spark(RULES.text)]) + "\n")
    role = f'"{ROLE}"'
    with ExitStack() as stack:
        for primary, *_ in shards.values():
            admin = stack.enter_context(psycopg.connect(primary.dsn("postgres"), autocommit=True))
            stack.callback(_drop_created, admin, primary, role)
            admin.execute(f"CREATE ROLE {role} SUPERUSER LOGIN REPLICATION".encode())
            for name, value in ROLE_SETTINGS.items():
                admin.execute(f"ALTER ROLE {role} SET {name} = {value if ',' in value else repr(value)}".encode())
            admin.execute(f"CREATE DATABASE {DATABASE}".encode())
        fleet = load_fleet(folder / "fleet.toml")
        for node in fleet.nodes:
            await_database(replace(node, dsn=make_conninfo(node.dsn, user="postgres")))
        yield fleet


def _drop_created(admin: psycopg.Connection[tuple[object, ...]], primary: EmbeddedNode, role: str) -> None:
    found = admin.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (DATABASE,)).fetchall()
    for (database,) in found:
        roll_back_prepared(primary.dsn(str(database)))
        admin.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())
    admin.execute(f"DROP ROLE IF EXISTS {role}".encode())


@contextmanager
def exact_history(
    shared: EmbeddedFleet, other: Sequence[EmbeddedNode], folder: Path, spark: Ready
) -> Iterator[History]:
    """Create a full snapshot and its increments, and restore some; the last but one increment takes two attempts.

    `other` is a primary of a different version, if there is one, and its standbys.
    """
    shards = {
        shard: (primary, *shared.backups_of(primary))
        for shard, primary in zip((EXACT, REDEFINED), shared.primaries, strict=True)
    }
    if other:
        shards[OTHER] = tuple(other)
    with exact_fleet(shards, folder) as fleet, ExitStack() as stack:
        # A standby rejects every query of a role that is serializable by default.
        nodes = tuple(replace(node, dsn=make_conninfo(node.dsn, user="postgres")) for node in fleet.nodes)
        stack.enter_context(dropping_slots(replace(fleet, nodes=nodes)))
        databases = {shard: nodes[0].dsn(DATABASE) for shard, nodes in shards.items()}
        exact = ExactDatabase(databases[EXACT])
        versions = OtherVersionDatabase(databases[OTHER], ExactDatabase(databases[OTHER])) if other else None
        history = History(Runs(fleet, spark), databases, exact, versions)
        run_history(history)
        yield history


def run_history(history: History) -> None:
    runs, filled = history.runs, [one for one in (history.exact, history.versions) if one]
    for one in filled:
        one.fill()
    run_schema_cases(history.databases[REDEFINED], 0)
    runs.init()
    history.commits.append(runs.full(NAME))
    history.record_states()
    for increment in range(1, LAST + 1):
        for one in filled:
            one.change(increment)
        run_schema_cases(history.databases[REDEFINED], increment)
        if increment == LAST - 1:
            with pytest.raises(CrashError):
                create_increment(runs.fleet, CreateRequest(NAME), runs.spark, CrashBeforeCommit())
            run_schema_cases(history.databases[REDEFINED], increment, is_aftermath=True)
        history.record_states()
        history.commits.append(runs.increment(NAME))
    for increment in RESTORED:
        history.restore(increment)
