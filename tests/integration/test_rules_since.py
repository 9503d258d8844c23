"""What fleet.toml excludes or admits once a chain has begun: the next increment follows it, and the chain goes on.

Judged by PostgreSQL's COPY of the source at the time of each increment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from fleet.progress import Silent
from fleet.tables.left_out import LeftOutKind
from fleet.tables.publications import TableNotAdmissibleError
from snapshots.create.increment import preview_increment
from snapshots.create.request import CreateRequest
from tests.integration.own_database import back, own_database
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embedded.fleet import EmbeddedFleet
    from snapshots.records.commit import Commit

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


def named(commit: Commit, kind: LeftOutKind) -> list[str]:
    return [one.name for one in commit.left_out or () if one.kind == kind]


def test_a_chain_goes_on_with_what_fleet_toml_admits_and_excludes_since(runs: Runs) -> None:
    (source,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    states = [sorted_copies(source)]

    def increment(how: Runs, *statements: str, empty: str = "") -> Commit:
        execute(source, *statements)
        commit = how.increment(NAME)
        states.append(sorted_copies(source) | ({empty: b""} if empty else {}))
        return commit

    execute(source, *NEW_LOG)
    # FULL would make its updates fail: what helps is a key, or what the hint says of fleet.toml.
    with pytest.raises(TableNotAdmissibleError, match=f"{LOG} on s1") as raised:
        runs.increment(NAME)
    assert "ADD PRIMARY KEY (…);" in raised.value.hint
    admitting = with_rules(runs, append_only=(LOG,))
    commit = increment(admitting, "INSERT INTO log VALUES ('two')")
    assert named(commit, LeftOutKind.APPEND_ONLY_TABLE) == [LOG]
    write = """
        INSERT INTO heavy VALUES ({0}, 'x'); UPDATE heavy SET what = '{0}' WHERE id = 1; INSERT INTO log VALUES ('{0}')
    """
    commit = increment(admitting, write.format(10))
    assert named(commit, LeftOutKind.EXCLUDED_TABLE) == []
    leaving = with_rules(runs, append_only=(LOG,), exclude=(HEAVY,))
    for number in (11, 12):
        commit = increment(leaving, write.format(number), empty=HEAVY)
        assert named(commit, LeftOutKind.EXCLUDED_TABLE) == [HEAVY]
    # It is in again, and what it holds by now with it.
    commit = increment(admitting, write.format(13))
    assert named(commit, LeftOutKind.EXCLUDED_TABLE) == []
    commit = increment(admitting, write.format(14))
    for number, expected in enumerate(states):
        runs.restore(NAME, back(runs.fleet), number)
        assert sorted_copies(back(runs.fleet).nodes[0].dsn) == expected, number
        assert runs.check_one(NAME, number).conflicts == []


def test_what_would_be_done_tells_of_them_too(runs: Runs) -> None:
    runs.full(NAME)
    execute(runs.fleet.nodes[0].dsn, *NEW_LOG)
    how = with_rules(runs, append_only=(LOG,), exclude=(HEAVY,))
    plan = preview_increment(how.fleet, CreateRequest(NAME), Silent())
    assert {(one.kind, one.name) for one in plan.left_out} >= {
        (LeftOutKind.APPEND_ONLY_TABLE, LOG),
        (LeftOutKind.EXCLUDED_TABLE, HEAVY),
    }
