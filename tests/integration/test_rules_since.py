"""If fleet.toml excludes or admits a table after a chain has begun, the next increment applies it to the same chain.

Restored rows are compared with PostgreSQL's COPY of the source at the time of each increment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.nodes.left_out import LeftOutKind
from cutline.nodes.publications import TableNotAdmissibleError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import preview_increment
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.snapshots.records.commit import Commit

NAME = "ruled"
SCHEMA = (
    "CREATE TABLE keyed (id int PRIMARY KEY, what text)",
    "CREATE TABLE heavy (id int PRIMARY KEY, what text)",
    "INSERT INTO keyed SELECT n, 'first' FROM generate_series(1, 5) AS n",
    "INSERT INTO heavy SELECT n, 'first' FROM generate_series(1, 5) AS n",
)
NEW_LOG = (
    "CREATE TABLE log (what text, twice text GENERATED ALWAYS AS (what || what) STORED)",
    "INSERT INTO log VALUES ('one')",
)
LOG, HEAVY = "public.log", "public.heavy"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "ruled") as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def with_rules(runs: Runs, append_only: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> Runs:
    groups = structs.replace(runs.fleet.groups, append_only=append_only, exclude=exclude)
    return replace(runs, fleet=replace(runs.fleet, groups=groups))


def names_of(commit: Commit, kind: LeftOutKind) -> list[str]:
    return [one.name for one in commit.left_out or () if one.kind == kind]


def test_a_chain_continues_with_tables_that_fleet_toml_now_admits_or_excludes(runs: Runs) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    states = [sorted_copies(source)]

    def increment(runs_now: Runs, *statements: str, empty: str = "") -> Commit:
        execute(source, *statements)
        commit = runs_now.increment(NAME)
        states.append(sorted_copies(source) | ({empty: b""} if empty else {}))
        return commit

    execute(source, *NEW_LOG)
    # REPLICA IDENTITY FULL would make updates fail; the remedy is a key, or the setting that the hint names.
    with pytest.raises(TableNotAdmissibleError, match=f"{LOG} on s1") as raised:
        runs.increment(NAME)
    assert "ADD PRIMARY KEY (…);" in raised.value.hint
    admitting = with_rules(runs, append_only=(LOG,))
    commit = increment(admitting, "INSERT INTO log VALUES ('two')")
    assert names_of(commit, LeftOutKind.APPEND_ONLY_TABLE) == [LOG]
    write = """
        INSERT INTO heavy VALUES ({0}, 'x'); UPDATE heavy SET what = '{0}' WHERE id = 1; INSERT INTO log VALUES ('{0}')
    """
    commit = increment(admitting, write.format(10))
    assert names_of(commit, LeftOutKind.EXCLUDED_TABLE) == []
    excluding = with_rules(runs, append_only=(LOG,), exclude=(HEAVY,))
    for number in (11, 12):
        commit = increment(excluding, write.format(number), empty=HEAVY)
        assert names_of(commit, LeftOutKind.EXCLUDED_TABLE) == [HEAVY]
    # The table is included again, with its present rows.
    commit = increment(admitting, write.format(13))
    assert names_of(commit, LeftOutKind.EXCLUDED_TABLE) == []
    commit = increment(admitting, write.format(14))
    for number, expected in enumerate(states):
        runs.restore(NAME, restore_target(runs.fleet), number)
        assert sorted_copies(restore_target(runs.fleet).nodes[0].dsn) == expected, number
        assert runs.check_one(NAME, number).conflicts == []


def test_a_preview_lists_the_tables_that_fleet_toml_now_admits_or_excludes(runs: Runs) -> None:
    runs.full(NAME)
    execute(runs.fleet.nodes[0].dsn, *NEW_LOG)
    runs_now = with_rules(runs, append_only=(LOG,), exclude=(HEAVY,))
    plan = preview_increment(runs_now.fleet, CreateRequest(NAME), Silent())
    assert {(one.kind, one.name) for one in plan.left_out} >= {
        (LeftOutKind.APPEND_ONLY_TABLE, LOG),
        (LeftOutKind.EXCLUDED_TABLE, HEAVY),
    }
