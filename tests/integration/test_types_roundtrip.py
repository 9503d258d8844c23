"""Tables of every kind, changed in every way, come back as they were at each increment.

Judged by PostgreSQL's own COPY of the source at the moments when nothing ran there, and by its sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from fleet.config import Fleet
from fleet.nodes.connections import with_database
from fleet.progress import Silent
from restore.plan import plan_restore
from restore.request import RestoreRequest
from restore.restore import restore_fleet
from tests.integration.odd_tables import FIRST_ROWS, INCREMENTS, SCHEMA, WideHistory, statements
from tests.snapshot_runs import Ready, Runs, described, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory

NAME = "odd"
SEED = 20261120
RANDOM_TRANSACTIONS = 150
RULES = '[groups]\nexclude = ["public.left_out"]\nappend_only = ["public.log"]\n'
NOT_COPIED = {"public.left_out", "public.unlogged"}
SEQUENCES_QUERY = """
SELECT n.nspname || '.' || c.relname, pg_sequence_last_value(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S'
"""
# What a dump says of everything but rows.
DEFINITIONS_QUERY = """
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname !~ '^(pg_|information_schema)'
UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT 'identity', relname, relreplident::text FROM pg_class WHERE relnamespace = 'public'::regnamespace
ORDER BY 1, 2, 3
"""


def run(dsn: str, script: Iterable[str]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in script:
            connection.execute(statement.encode())


def rows_of(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


def state_of(dsn: str) -> tuple[Mapping[str, bytes], Mapping[object, object]]:
    rows = {table: text for table, text in sorted_copies(dsn).items() if table not in NOT_COPIED}
    return rows, dict(rows_of(dsn, SEQUENCES_QUERY))


def test_tables_of_every_kind_come_back_from_every_increment(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    embedded = fleet_factory(shards=1, backups=1)
    (source,) = embedded.dsns()
    fleet = described(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=RULES)
    # Another database of the same server is as good a target as any.
    target = replace(fleet, nodes=(with_database(fleet.primaries[0], "back"),))
    runs = Runs(fleet, Ready(spark))
    history = WideHistory(SEED)
    run(source, statements(SCHEMA))
    run(source, statements(FIRST_ROWS))
    runs.init()
    runs.full(NAME)
    states = [state_of(source)]
    for number, script in enumerate(INCREMENTS):
        run(source, history.statements(RANDOM_TRANSACTIONS, number))
        run(source, statements(script))
        states.append(state_of(source))
        stored = [one for found in runs.increment(NAME).segments.values() for one in found]
        assert sum(one.partials for one in stored) > RANDOM_TRANSACTIONS / 3
        assert sum(one.truncates for one in stored) > 0 or number == 0

    (restored,) = (node.dsn for node in target.nodes)
    for increment, (rows, sequences) in enumerate(states):
        runs.restore(NAME, target, increment)
        found, found_sequences = state_of(restored)
        assert found.keys() == rows.keys()
        for table, text in rows.items():
            assert found[table] == text, f"{table} at increment {increment}, seed {SEED}"
        assert found_sequences == sequences
        report = runs.check_one(NAME, increment)
        assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
    assert_whole(source, restored)
    assert_a_part_comes_back_alone(runs, target, source)


def assert_whole(source: str, restored: str) -> None:
    """What is no row is there too: constraints, indexes, triggers that work, the table that was left out."""
    assert rows_of(restored, DEFINITIONS_QUERY) == rows_of(source, DEFINITIONS_QUERY)
    assert rows_of(restored, "SELECT * FROM left_out") == []
    run(restored, ["INSERT INTO watched VALUES (1000, 'the trigger works')"])
    assert rows_of(restored, "SELECT watched FROM seen WHERE watched = 1000") == [(1000,)]


def assert_a_part_comes_back_alone(runs: Runs, target: Fleet, source: str) -> None:
    """Some tables of a snapshot, without what they would refer to."""
    request = RestoreRequest(NAME, groups=("public.measured*", "public.child"), replace=True)
    report = restore_fleet(plan_restore(runs.fleet, target, request), runs.spark, Silent())
    assert sorted(report.left_out) == [
        'foreign key "child_parent_fkey" of "public"."child" on s1',
        'foreign key "measured_place_fkey" of "public"."measured" on s1',
    ]
    (restored,) = (node.dsn for node in target.nodes)
    rows, expected = sorted_copies(restored), sorted_copies(source)
    for table, text in rows.items():
        wanted = expected[table] if table.startswith(("public.measured_", "public.child")) else b""
        assert text == wanted, table
