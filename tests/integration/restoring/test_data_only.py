"""`restore --data-only`: rows and values go into tables that exist, which are empty again unless it comes to the end.

The tables have triggers that would refuse every row, foreign keys, and columns that the snapshot lacks.
"""

from __future__ import annotations

import psycopg
import pytest

from cutline.nodes.lock import FleetBusyError, lock_fleet
from cutline.nodes.publications import EventTriggerError
from cutline.nodes.sessions import open_sessions
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.fill_checks import find_used
from cutline.restore.rows.load import LoadError
from cutline.restore.rows.references import ForeignKeyViolatedError
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.ddl.dump import find_ddl
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.filled import (
    REQUEST,
    assert_clean,
    assert_empty,
    assert_filled,
    load,
    rows_of,
    tables_to_fill,
    words,
)
from tests.integration.restoring.target_place import (
    NAME,
    SHARDS,
    Place,
    hidden,
)


def test_rows_and_values_are_loaded_into_tables_that_stay_as_they_are(place: Place) -> None:
    """The DDL in the store is not needed."""
    with tables_to_fill(place):
        code, planned = run_here(place.fleet, *words(place, "--data-only", "--dry-run"))
        assert (code, planned["scope"]["data_only"], planned["replaces"]) == (0, True, []), planned
        assert_empty(place)
        code, text = run_and_capture(place.fleet, *words(place, "--data-only", "--dry-run"))
        assert (code, "s1 into the tables of database shop on" in text) == (0, True), text
        ddl = find_ddl(read_chain(place.fleet.store.open(), NAME), "s2").key
        with hidden(place, ddl):
            code, done = run_here(place.fleet, *words(place, "--data-only"), spark=place.spark)
        assert (code, done["scope"]["data_only"], done["warnings"], done["aside"]) == (0, True, [], []), done
        assert [one["rows"] for one in done["nodes"]] == [place.rows(shard) for shard in range(SHARDS)]
        assert any("materialized view public.total on s1" in one for one in done["left_out"])
        assert done["plan"]["targets"][0]["database"] == "shop"
        assert_filled(place)


def test_what_a_chosen_group_leaves_out_is_named(place: Place) -> None:
    others = "rows of 3 other tables on s1: public.account, public.log, public.transfer"
    with tables_to_fill(place):
        code, done = run_here(place.fleet, *words(place, "--data-only", "--group", "public.item"), spark=place.spark)
        assert (code, others in done["left_out"]) == (0, True), done


def test_columns_that_stay_null_are_named(place: Place) -> None:
    """Also one that the snapshot has as a generated column, whose values it therefore lacks."""
    with tables_to_fill(place):
        first, second, _ = place.target.primaries
        execute(first.dsn, "ALTER TABLE item ALTER twice DROP EXPRESSION", "ALTER TABLE log ADD since date")
        execute(first.dsn, "ALTER TABLE item ADD k int GENERATED ALWAYS AS IDENTITY, ADD d text DEFAULT 'x'")
        execute(second.dsn, "CREATE DOMAIN preset AS int DEFAULT 7; ALTER TABLE log ADD p preset")
        code, done = run_here(place.fleet, *words(place, "--data-only"), spark=place.spark)
        assert code == 0, done
        assert [line for line in done["left_out"] if line.startswith("values of columns")] == [
            "values of columns public.item.twice, public.log.since on s1: the snapshot has none; they are NULL"
        ]
        with psycopg.connect(first.dsn) as connection:
            nulls = connection.execute("SELECT count(*) > 0, count(twice), count(k) = count(*) FROM item").fetchone()
            assert nulls == (True, 0, True)


def test_many_materialized_views_are_counted(place: Place) -> None:
    with tables_to_fill(place):
        first = place.target.primaries[0]
        execute(first.dsn, *(f"CREATE MATERIALIZED VIEW more_{n} AS SELECT {n} AS n" for n in range(4)))
        options = ("--data-only", "--group", "public.item", "--dry-run")
        code, text = run_and_capture(place.fleet, *words(place, *options))
        assert code == 0, text
        views = "left out: rows of 5 materialized views on s1: they are not refreshed: --json lists all of them"
        rows = "left out: rows of 3 other tables on s1: public.account, public.log, public.transfer"
        assert text.index(rows) < text.index(views), text
        assert text.count("materialized view public.total on s2: the view is not refreshed") == 1, text


def test_a_violated_foreign_key_is_found_and_all_is_undone(place: Place) -> None:
    """tests/integration/restoring/test_references.py has the kinds of keys."""
    last = place.target.primaries[-1]
    with tables_to_fill(place):
        execute(last.dsn, "DELETE FROM kind WHERE id = 1")
        with pytest.raises(ForeignKeyViolatedError) as raised:
            load(place)
        assert "foreign key item_n_fkey of table public.item is violated" in raised.value.message
        assert "(n) = (1) references a missing row of public.kind" in raised.value.message
        execute(last.dsn, "INSERT INTO kind VALUES (1)")
        assert_empty(place)


def test_an_event_trigger_that_is_always_enabled_is_named(place: Place) -> None:
    """The others don't act on what a restore keeps in the database."""
    with tables_to_fill(place, "ALTER EVENT TRIGGER refuse ENABLE ALWAYS"):
        with pytest.raises(EventTriggerError) as raised:
            load(place)
        assert "event trigger refuse in database shop, which calls public.refuse_ddl()" in raised.value.message
        assert "rejected CREATE SCHEMA cutline_restoring_" in raised.value.message
        assert raised.value.message.endswith(": the trigger acts")
        assert_empty(place)


def test_a_row_that_somebody_else_writes_meanwhile_is_found(place: Place) -> None:
    """It is not kept, because what the restore has found empty is empty again. Other operations are locked out."""
    second = place.target.primaries[1]

    def write(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(RestoreCrashPoint.LOADING), SHARDS):
            execute(second.dsn, "INSERT INTO account VALUES (0, 1)")
            with open_sessions(place.target, [second]) as sessions, pytest.raises(FleetBusyError, match="restore"):
                lock_fleet(sessions, place.target.name, "cutline create daily ops@db7:4711").__enter__()
            assert run_here(place.fleet, *words(place, "--data-only"))[0] == 7

    with tables_to_fill(place):
        found = r"node s2: table public.account has 10001 rows, but 10000 were loaded"
        watching = Watching(write)
        with pytest.raises(LoadError, match=found):
            load(place, watching)
        assert watching.notes[-1] == "the restore was undone: the tables that it filled are empty again"
        assert_empty(place)


def test_with_some_tables_others_and_their_sequences_stay(place: Place) -> None:
    """`log` uses no sequence; `item` uses `numbers`, as a default of its column."""
    with tables_to_fill(place, "SELECT setval('numbers', 5); INSERT INTO account VALUES (1, 1)"):
        load(place, request=RestoreRequest(NAME, groups=("public.log",), scope=RestoreScope(data_only=True)))
        for node, truth in zip(place.target.primaries, place.truth, strict=True):
            assert rows_of(node.dsn) == {"public.log": truth["public.log"], "public.item": b""}
            with psycopg.connect(node.dsn) as connection:
                assert connection.execute("SELECT last_value FROM numbers").fetchone() == (5,)
                assert connection.execute("SELECT count(*) FROM account").fetchone() == (1,)
        assert_clean(place)
        plan = plan_restore(place.fleet, place.target, REQUEST)
        for node, (shard, groups) in zip(place.target.primaries, plan.groups.items(), strict=True):
            with psycopg.connect(node.dsn) as connection:
                for table, used in (("item", ["numbers"]), ("log", [])):
                    chosen = [one for one in groups if one.table == table]
                    found = find_used(connection, chosen, plan.chain.sequences(shard))
                    assert [one.name for one in found] == used
