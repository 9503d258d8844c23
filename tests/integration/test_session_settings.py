"""What the server computes from rows comes back as the source's sessions compute it, not as ours would.

The source's server has its own TimeZone, and its database sets DateStyle, a text search configuration and a setting of
an application. The functions are marked immutable although they are not, as in many real databases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import LoadError
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.ddl.database_facts import read_session_settings
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.servers.dealt import current_server
from tests.servers.fleets import fleet_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, SOURCE = "set", "computed"
SETTINGS = (
    f"ALTER DATABASE {SOURCE} SET datestyle = 'SQL, DMY'",
    f"ALTER DATABASE {SOURCE} SET lc_monetary = 'C'",
    f"ALTER DATABASE {SOURCE} SET app.sells = 'yes'",
    "CREATE TEXT SEARCH CONFIGURATION public.words (COPY = german)",
    f"ALTER DATABASE {SOURCE} SET default_text_search_config = 'public.words'",
)
STATEMENTS = (
    "CREATE FUNCTION day_of(timestamptz) RETURNS date IMMUTABLE LANGUAGE sql AS 'SELECT $1::date'",
    "CREATE FUNCTION shown(date) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1::text'",
    """CREATE TABLE visit (id int PRIMARY KEY, at timestamptz NOT NULL, body text, price money,
           day date GENERATED ALWAYS AS (day_of(at)) STORED,
           CHECK (at::time >= '07:00'), CHECK (current_setting('app.sells') = 'yes'))""",
    "CREATE INDEX visit_shown ON visit (shown(day))",
    "CREATE MATERIALIZED VIEW per_day AS SELECT at::date AS day, day::text AS shown, count(*) FROM visit GROUP BY 1, 2",
    "CREATE MATERIALIZED VIEW words AS SELECT id, to_tsvector(body) AS words FROM visit",
    # In UTC, this is the day before, at 23:30.
    "INSERT INTO visit VALUES (1, '2026-03-05 08:30+09', 'die Bäume standen', '12.50')",
    "INSERT INTO visit VALUES (2, '2026-03-06 07:10+09', 'der Baum steht', '0.99')",
    "REFRESH MATERIALIZED VIEW per_day",
    "REFRESH MATERIALIZED VIEW words",
)
QUERIES = (
    "SELECT id, at::text, day::text, price::text FROM visit ORDER BY id",
    "SELECT day::text, shown, count FROM per_day ORDER BY 1",
    "SELECT id, words::text FROM words ORDER BY 1",
    "SELECT id FROM visit WHERE shown(day) = '06/03/2026' ORDER BY 1",
    "SELECT id FROM visit WHERE shown(day) = '2026-03-05' ORDER BY 1",
)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    settings = {"timezone": "Asia/Tokyo"}
    folder = tmp_path_factory.mktemp("computed")
    with fleet_of(folder / "fleet", [current_server(standbys=False)], schema=False, settings=settings) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def runs(embedded: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    """A chain with a full snapshot and an increment with a row of each kind."""
    folder = tmp_path_factory.mktemp("of-computed")
    with database_on(embedded, SOURCE, folder) as fleet, dropping_slots(fleet):
        execute(fleet.primaries[0].dsn, *SETTINGS)
        execute(fleet.primaries[0].dsn, *STATEMENTS)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full(NAME)
        execute(
            fleet.primaries[0].dsn,
            "INSERT INTO visit VALUES (3, '06/03/2026 07:00', 'das Haus', '1.00')",
            "UPDATE visit SET at = '05/03/2026 08:40' WHERE id = 1",
            "REFRESH MATERIALIZED VIEW per_day",
            "REFRESH MATERIALIZED VIEW words",
        )
        runs.increment(NAME)
        yield runs


def target_of(runs: Runs, database: str) -> Fleet:
    nodes = tuple(replace(node, dsn=make_conninfo(node.dsn, dbname=database)) for node in runs.fleet.nodes)
    return replace(runs.fleet, nodes=nodes)


def answers(fleet: Fleet) -> list[list[Any]]:
    """The answers that an application gets; the index is used wherever it can be."""
    with psycopg.connect(fleet.primaries[0].dsn) as connection:
        connection.execute("SET enable_seqscan = off")
        return [connection.execute(query.encode()).fetchall() for query in QUERIES]


def test_what_is_computed_from_rows_is_the_same_after_a_restore(runs: Runs) -> None:
    expected = answers(runs.fleet)
    assert expected[0][0][1:3] == ("05/03/2026 08:40:00 JST", "05/03/2026")
    assert (expected[3], expected[4]) == ([(2,), (3,)], [])
    target = target_of(runs, f"{SOURCE}_back")
    report = runs.restore(NAME, target)
    assert answers(target) == expected
    assert report.warnings == []
    # Without them, the database has other settings, but rows that were computed like the source's.
    plain = target_of(runs, f"{SOURCE}_plain")
    runs.restore(NAME, plain, scope=RestoreScope(no_database_settings=True))
    with psycopg.connect(plain.primaries[0].dsn) as connection:
        connection.execute("SET datestyle = 'SQL, DMY'")
        assert [connection.execute(query.encode()).fetchall() for query in QUERIES[:3]] == expected[:3]


def test_rows_for_existing_tables_are_computed_with_the_settings_of_their_database(runs: Runs) -> None:
    target = target_of(runs, f"{SOURCE}_filled")
    (node,) = target.primaries
    runs.restore(NAME, target, scope=RestoreScope(schema_only=True))
    server = with_database(node, "postgres").dsn

    def fill() -> None:
        request = RestoreRequest(NAME, scope=RestoreScope(data_only=True))
        restore_fleet(plan_restore(runs.fleet, target, request), runs.spark, Silent())

    execute(server, f"ALTER DATABASE {SOURCE}_filled SET timezone = 'Asia/Kamchatka'")
    execute(server, f"ALTER DATABASE {SOURCE}_filled SET app.sells = 'no'")
    with pytest.raises(LoadError, match="violates check constraint"):
        fill()
    execute(server, f"ALTER DATABASE {SOURCE}_filled SET app.sells = 'yes'")
    fill()
    with psycopg.connect(node.dsn) as connection:
        days = connection.execute("SELECT id, day = (at AT TIME ZONE 'Asia/Kamchatka')::date FROM visit").fetchall()
    assert sorted(days) == [(1, True), (2, True), (3, True)]


def test_no_setting_of_a_role_is_recorded(runs: Runs) -> None:
    chain = read_chain(runs.fleet.store.open(), NAME)
    found = chain.session_settings("s1")
    assert {name: found[name] for name in ("timezone", "datestyle", "app.sells")} == {
        "timezone": "Asia/Tokyo", "datestyle": "SQL, DMY", "app.sells": "yes",
    }  # fmt: skip
    assert found["default_text_search_config"] == "public.words"
    (node,) = runs.fleet.primaries
    server = with_database(node, "postgres").dsn
    execute(server, "ALTER ROLE postgres SET datestyle = 'German'", "ALTER ROLE postgres SET timezone = 'America/Lima'")
    try:
        with connect(node) as connection:
            read = read_session_settings(node, connection)
    finally:
        execute(server, "ALTER ROLE postgres RESET ALL")
    # What the server's file says can't be seen by a role that sets it.
    assert read == {name: value for name, value in found.items() if name != "timezone"}


def test_a_value_that_the_target_does_not_know_is_a_warning(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Chain.session_settings

    def with_another(chain: Chain, shard: str) -> dict[str, str]:
        return {**stored(chain, shard), "lc_time": "xx_YY.lost"}

    monkeypatch.setattr(Chain, "session_settings", with_another)
    target = target_of(runs, f"{SOURCE}_other")
    report = runs.restore(NAME, target)
    (warning,) = report.warnings
    assert "what depends on setting lc_time was computed without the source's value 'xx_YY.lost'" in warning
    assert answers(target) == answers(runs.fleet)
