"""The work of each statement that a server runs grows with the number of objects, not with its square.

The server logs how it ran every statement (auto_explain). With OBJECTS objects of each kind, a statement that searches
all of them for each of them handles 640,000 rows; one that reads every catalog once handles 60,000.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.ddl.fingerprint import OBJECTS_QUERIES, ROWS_QUERIES
from tests.chains.folded_rows import session_without_spark
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.servers.fleets import fleet_of
from tests.servers.installed import require_server

NAME, BACK = "many", "back"
OBJECTS, ROWS_MAX = 800, 250_000
SETTINGS = {
    "session_preload_libraries": "auto_explain", "auto_explain.log_min_duration": "0", "auto_explain.log_analyze": "on",
    "auto_explain.log_format": "json", "auto_explain.log_timing": "off", "auto_explain.log_nested_statements": "on",
    "max_locks_per_transaction": "1024", "autovacuum": "off", "jit": "off",
}  # fmt: skip
UNLOGGED = "SET auto_explain.log_min_duration = -1"
# Each kind of object that a database may have thousands of.
OBJECTS_QUERY = f"""
CREATE SCHEMA v;
CREATE FUNCTION v.touch() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
CREATE TABLE v.parent (id int PRIMARY KEY);
CREATE TABLE v.divided (id int, at int, PRIMARY KEY (id, at)) PARTITION BY LIST (at);
DO $$ BEGIN FOR i IN 1..{OBJECTS} LOOP
  EXECUTE format('CREATE TYPE v.mood_%s AS ENUM (''a'', ''b'')', i);
  EXECUTE format('CREATE DOMAIN v.positive_%s AS int CHECK (value > 0)', i);
  EXECUTE format('CREATE FUNCTION v.own_%s(int) RETURNS int LANGUAGE sql IMMUTABLE AS ''SELECT $1''', i);
  EXECUTE format('CREATE TABLE v.t_%s (id serial PRIMARY KEY, mood v.mood_%s, part v.positive_%s, name text,'
                 ' parent int REFERENCES v.parent, CHECK (id > 0))', i, i, i);
  EXECUTE format('CREATE INDEX ON v.t_%s (v.own_%s(id))', i, i);
  EXECUTE format('CREATE TRIGGER t BEFORE INSERT ON v.t_%s FOR EACH ROW EXECUTE FUNCTION v.touch()', i);
  EXECUTE format('CREATE VIEW v.view_%s AS SELECT * FROM v.t_%s', i, i);
  EXECUTE format('COMMENT ON TABLE v.t_%s IS ''one of many''', i);
  EXECUTE format('GRANT SELECT ON v.t_%s TO public', i);
  EXECUTE format('CREATE POLICY seen ON v.t_%s USING (true)', i);
  EXECUTE format('CREATE TABLE v.divided_%s PARTITION OF v.divided FOR VALUES IN (%s)', i, i);
  EXECUTE format('CREATE TABLE v.heir_%s (PRIMARY KEY (id)) INHERITS (v.parent)', i);
END LOOP; END $$
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    folder = tmp_path_factory.mktemp("plans")
    with fleet_of(folder / "fleet", [require_server(17)], schema=False, settings=SETTINGS) as fleet:
        execute(fleet.primaries[0].dsn("postgres"), "CREATE DATABASE bank")
        execute(fleet.dsns()[0], OBJECTS_QUERY)
        yield fleet


@pytest.fixture
def runs(servers: EmbeddedFleet, tmp_path: Path) -> Iterator[Runs]:
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    with dropping_slots(fleet):
        yield Runs(fleet, Ready(session_without_spark()))


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in (UNLOGGED, *statements):
            connection.execute(statement.encode())


def large_plans(servers: EmbeddedFleet) -> list[str]:
    """Return the logged statements of which a step handles more than ROWS_MAX rows."""
    text = servers.primaries[0].log_file.read_text(errors="replace")
    plans = [json.loads(plan) for plan in re.findall(r"plan:\n((?:\t.*\n)+)", text)]
    # Otherwise the test would prove nothing.
    assert len(plans) > 20
    return [f"{rows}: {plan['Query Text']}" for plan in plans if (rows := most_rows(plan["Plan"])) > ROWS_MAX]


def most_rows(step: Mapping[str, Any]) -> float:
    """Return the most rows that a step of a plan returns or removes, in all its loops."""
    rows = sum(count for name, count in step.items() if name == "Actual Rows" or name.startswith("Rows Removed by"))
    return max([rows * step.get("Actual Loops", 1), *map(most_rows, step.get("Plans", ()))])


def test_no_statement_of_a_command_searches_all_objects_for_each_object(
    servers: EmbeddedFleet, runs: Runs, tmp_path: Path
) -> None:
    (source,) = servers.dsns()
    target = replace(runs.fleet, nodes=(with_database(runs.fleet.nodes[0], BACK),))

    def restore(fleet: Fleet, **options: Any) -> None:
        restore_fleet(plan_restore(runs.fleet, fleet, RestoreRequest(NAME, **options)), runs.spark, Silent())

    commands: dict[str, Callable[[], object]] = {
        "init": runs.init,
        "create": lambda: runs.full(NAME),
        "create --incremental": lambda: runs.increment(NAME),
        "restore": lambda: restore(target),
        "restore --data-only": lambda: restore(target, scope=RestoreScope(data_only=True)),
    }
    large: dict[str, list[str]] = {}
    for name, command in commands.items():
        # Forget what was logged before.
        servers.primaries[0].log_file.write_text("")
        command()
        large[name] = large_plans(servers)
        if name == "create":
            # Then the next increment reads all definitions again.
            execute(source, "ALTER TABLE v.t_1 ADD COLUMN added int", "INSERT INTO v.t_2 (name) VALUES ('new')")
        if name == "restore":
            execute(target.nodes[0].dsn, "TRUNCATE v.t_2")
    assert [name for name, plans in large.items() if plans] == [], large


@pytest.mark.parametrize(
    "query",
    [*OBJECTS_QUERIES.values(), *ROWS_QUERIES.values()],
    ids=["objects", "visible objects", "rows", "visible rows"],
)
def test_the_fingerprint_needs_no_hash_table_of_all_objects(servers: EmbeddedFleet, query: bytes) -> None:
    """With 5,000 tables and 64 kB for hash tables, it took 41 s, instead of 0.2 s; with 100,000 and 4 MB, hours."""
    with psycopg.connect(servers.dsns()[0], autocommit=True) as connection:
        connection.execute(UNLOGGED)
        connection.execute(f"SET search_path = {PINNED_SETTINGS['search_path']}")
        connection.execute("SET work_mem = '64kB'")
        connection.execute("SET jit = off")
        ((plan,),) = connection.execute(b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + query).fetchall()
    assert most_rows(plan[0]["Plan"]) < ROWS_MAX
