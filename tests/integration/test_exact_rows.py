"""Rows come back exactly: every type, every statement, every shape of table, at every cut, by PostgreSQL's own output.

One chain on one shard and its standby holds all of it, each kind in a schema of its own. The role that Cutline connects
as has every setting that changes how a value is printed or read, so a session that does not speak with settings of its
own fails here.

In short on the wheel's version, in the long form also on those of SNAPSHOT_TEST_PG_BINS, restored into the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from embedded.fleet import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from fleet.config import Fleet
from fleet.nodes.connections import PINNED_SETTINGS, connect, with_database
from fleet.programs.wheel import run_tool
from tests.integration import shaped_tables
from tests.integration.consequence_cases import CONSEQUENCE_CASES
from tests.integration.odd_tables import statements
from tests.integration.own_shard import database_on
from tests.integration.statement_cases import STATEMENT_CASES
from tests.integration.toasted_tables import TOAST_INCREMENTS, toasted
from tests.integration.typed_tables import Typed, changes_of, create_typed, run
from tests.integration.values_of_types import RENAMES
from tests.other_servers import OTHERS, needed
from tests.snapshot_runs import Ready, Runs, chains_dropped, sorted_copies
from tests.soak import SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
NAME = "exact"
CASES = STATEMENT_CASES | CONSEQUENCE_CASES
DATABASE, BACK = "exact", "exact_back"
ROLE = "reader of 'odd' settings"
# Of the role: what changes how values are printed and read, and what would end our sessions.
ROLE_SETTINGS = {
    "datestyle": "German, DMY", "intervalstyle": "sql_standard", "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-15", "bytea_output": "escape", "xmlbinary": "hex", "xmloption": "document",
    "lc_monetary": "C.utf8", "array_nulls": "off", "standard_conforming_strings": "off", "transform_null_equals": "on",
    "search_path": "types, own, public", "quote_all_identifiers": "on", "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on", "default_transaction_read_only": "on", "statement_timeout": "100ms",
    "lock_timeout": "1ms", "idle_in_transaction_session_timeout": "100ms", "idle_session_timeout": "100ms",
    "synchronize_seqscans": "on", "client_encoding": "LATIN1",
}  # fmt: skip
# States are read with these, one after the other: what one prints alike another may tell apart.
READERS = (
    {},
    {"datestyle": "SQL, DMY", "intervalstyle": "iso_8601", "timezone": "America/St_Johns", "extra_float_digits": "3",
     "bytea_output": "escape", "xmlbinary": "hex", "search_path": ""},
)  # fmt: skip
# Before it a standby's WAL can't be decoded.
STANDBYS_VERSION = 160000
State = tuple[Mapping[str, bytes], ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The source's database, and the description of its fleet, whose role has settings of its own."""

    dsn: str
    fleet: Fleet


@dataclass(frozen=True, slots=True)
class History:
    """What the source was at every increment, and what was restored of some."""

    typed: list[Typed]
    states: list[State]
    restored: Mapping[int, State]
    dumps: tuple[list[str], list[str]]
    check: Any
    fleet: Fleet
    dsn: str


@contextmanager
def source_on(embedded: EmbeddedFleet, folder: Path) -> Iterator[Source]:
    """A database of its own, and a role with odd settings, which Cutline connects as."""
    primary = embedded.primaries[0]
    role = f'"{ROLE}"'
    with psycopg.connect(primary.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} SUPERUSER LOGIN REPLICATION".encode())
        try:
            for name, value in ROLE_SETTINGS.items():
                admin.execute(f"ALTER ROLE {role} SET {name} = {value if ',' in value else repr(value)}".encode())
            with database_on(embedded, DATABASE, folder, user=ROLE) as fleet:
                yield Source(primary.dsn(DATABASE), fleet)
        finally:
            admin.execute(f"DROP ROLE {role}".encode())


def state_of(dsn: str) -> State:
    found = []
    for settings in READERS:
        options = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items())
        found.append(sorted_copies(make_conninfo(dsn, options=options)))
    return tuple(found)


def dump_of(dsn: str) -> list[str]:
    """What pg_dump says of the whole database, its lines sorted: the order of rows is nobody's."""
    done = run_tool("pg_dump", "--dbname", dsn, "--inserts", "--no-publications", "--restrict-key=x", seconds_max=120)
    return sorted(done.stdout.split("\n"))


def execute(dsn: str, script: list[str], *, schema: str | None = None) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        if schema:
            connection.execute(f"SET search_path = {schema}".encode())
        for statement in script:
            connection.execute(statement.encode())


def fill(dsn: str) -> list[Typed]:
    """Everything that is there first."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        typed = create_typed(connection)
    for step in shaped_tables.steps():
        execute(dsn, step[0])
    for name, case in CASES.items():
        execute(dsn, [f"CREATE SCHEMA {name}"])
        execute(dsn, list(statements(case.first)), schema=name)
    execute(dsn, toasted(0))
    return typed


def change(dsn: str, typed: list[Typed], increment: int) -> None:
    """What happens before the given increment."""
    execute(dsn, toasted(increment))
    if increment == 3:
        execute(dsn, list(RENAMES))
    if increment > 2:
        return
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=pg_catalog,ext") as connection:
        for table in typed:
            run(connection, changes_of(table, increment))
    for step in shaped_tables.steps():
        execute(dsn, step[increment])
    for name, case in CASES.items():
        execute(dsn, list(statements(case.increments[increment - 1])), schema=name)
    with psycopg.connect(dsn) as connection, connection.cursor().copy("COPY merges.t FROM STDIN") as copy:
        copy.write(f"{increment * 7000}\tcopied {increment} \\\\N\t\\N\n".encode())


@pytest.fixture(scope="module", params=[None, *OTHERS * bool(SOAK_SECONDS)], ids=lambda one: str(one or "wheel"))
def embedded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """The shared fleet, or a shard of another version with a standby."""
    if request.param is None:
        yield request.getfixturevalue("shared_fleet")
        return
    directory = tmp_path_factory.mktemp("other") / "fleet"
    try:
        yield start_fleet(directory, shards=1, backups=1, schema=False, programs={"s1": needed(request.param)})
    finally:
        if is_fleet(directory):
            stop_fleet(directory, delete=True)


@pytest.fixture(scope="module")
def history(
    embedded: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[History]:
    """A full snapshot and its increments, the first two of them and the last restored."""
    folder = tmp_path_factory.mktemp("exact")
    with ExitStack() as stack:
        source = stack.enter_context(source_on(embedded, folder))
        runs = Runs(source.fleet, Ready(spark))
        # A role that is serializable by default can do nothing on a standby.
        nodes = tuple(replace(node, dsn=make_conninfo(node.dsn, user="postgres")) for node in source.fleet.nodes)
        stack.enter_context(chains_dropped(replace(source.fleet, nodes=nodes)))
        typed = fill(source.dsn)
        runs.init()
        runs.full(NAME)
        states = [state_of(source.dsn)]
        for increment in range(1, TOAST_INCREMENTS + 1):
            change(source.dsn, typed, increment)
            states.append(state_of(source.dsn))
            runs.increment(NAME)
        target = replace(source.fleet, nodes=(with_database(source.fleet.primaries[0], BACK),))
        back = make_conninfo(source.dsn, dbname=BACK)
        restored = {}
        for increment in (0, 1, 2, TOAST_INCREMENTS):
            runs.restore(NAME, target, increment)
            restored[increment] = state_of(back)
        yield History(
            typed,
            states,
            restored,
            (dump_of(source.dsn), dump_of(back)),
            runs.check_one(NAME),
            source.fleet,
            source.dsn,
        )


RESTORED = (0, 1, 2, TOAST_INCREMENTS)


def assert_same(history: History, increment: int, *schemas: str) -> int:
    """The tables of these schemas are what they were; how many that is."""
    count = 0
    for was, found in zip(history.states[increment], history.restored[increment], strict=True):
        wanted = {table for table in was if table.startswith(tuple(f"{schema}." for schema in schemas))}
        assert wanted == {table for table in found if table.startswith(tuple(f"{schema}." for schema in schemas))}
        for table in sorted(wanted):
            assert found[table] == was[table], f"{table} at increment {increment}"
        count = len(wanted)
    return count


def changed(history: History, schema: str, increment: int) -> set[str]:
    """The schema's tables that the increment changed."""
    before, after = history.states[increment - 1][0], history.states[increment][0]
    return {table for table in after if table.startswith(f"{schema}.") and before[table] != after[table]}


@pytest.mark.parametrize("increment", RESTORED)
def test_every_type_comes_back_as_key_and_as_value(history: History, increment: int) -> None:
    assert assert_same(history, increment, "types", "own") >= len(history.typed) > 120
    if increment in (1, 2):
        assert changed(history, "types", increment) >= {table.name for table in history.typed if len(table.keys) > 1}


@pytest.mark.parametrize("case", CASES)
def test_what_statements_did_comes_back(history: History, case: str) -> None:
    for increment in RESTORED:
        assert assert_same(history, increment, case) > 0
    assert changed(history, case, 1)
    assert changed(history, case, 2)


SCHEMAS = sorted({*shaped_tables.NAMES, *(schema for schema, _ in shaped_tables.SAME_NAMES)})


@pytest.mark.parametrize("schema", SCHEMAS)
def test_names_of_every_kind_come_back(history: History, schema: str) -> None:
    for increment in RESTORED:
        assert assert_same(history, increment, schema_text(schema)) > 0
    assert changed(history, schema_text(schema), 1)


def schema_text(name: str) -> str:
    """The schema as format's %I prints it."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name) and name not in ("select", "user", "null")
    return name if plain else '"' + name.replace('"', '""') + '"'


def test_rows_of_1600_columns_come_back(history: History) -> None:
    for increment in RESTORED:
        assert assert_same(history, increment, "widest") == 2
    assert changed(history, "widest", 1) == {"widest.numbers", "widest.texts"}


def test_large_values_that_updates_left_alone_come_back_after_many_increments(history: History) -> None:
    for increment in RESTORED:
        assert assert_same(history, increment, "toast") >= 3
    for increment in range(1, TOAST_INCREMENTS + 1):
        assert changed(history, "toast", increment)


def test_the_whole_database_is_what_pg_dump_says_of_its_source(history: History) -> None:
    source, back = history.dumps
    assert back == source
    assert len(source) > 1000


def test_primary_and_standby_hold_the_same(history: History) -> None:
    with psycopg.connect(history.dsn) as connection:
        has_standbys = connection.info.server_version >= STANDBYS_VERSION
    assert history.check.conflicts == []
    assert history.check.result == ("valid" if has_standbys else "inconclusive")
    assert (history.check.skipped == []) == has_standbys


def test_no_setting_of_a_role_reaches_our_sessions(history: History) -> None:
    (node,) = history.fleet.primaries
    pinned = ROLE_SETTINGS.keys() & PINNED_SETTINGS.keys()
    with psycopg.connect(node.dsn) as odd, connect(node) as ours:
        for name in sorted(pinned):
            assert shown(odd, name) != shown(ours, name), name
    assert ROLE_SETTINGS.keys() - pinned == {"client_encoding"}


def shown(connection: psycopg.Connection[Any], name: str) -> object:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return row[0]
