"""`restore --schema`: the rows of the tables in some schemas, with and without `--group`."""

from __future__ import annotations

import psycopg

from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.parts.two_places import TwoPlaces

ROWS = ("public.item", "sales.invoice", "app.customer", "app.line")


def counts(fleet: Fleet) -> dict[str, int]:
    with psycopg.connect(fleet.primaries[0].dsn) as connection:
        found = {}
        for table in ROWS:
            ((found[table],),) = connection.execute(f"SELECT count(*) FROM {table}".encode())
        return found


def test_the_rows_of_a_schema_are_restored_and_those_of_a_pattern(places: TwoPlaces) -> None:
    words = ["--schema", "sales", "--group", "app.l*"]
    planned = places.restore(*words, "--dry-run", to=places.beside)
    done = places.restore(*words, to=places.beside)
    assert counts(places.beside) == {"public.item": 0, "sales.invoice": 20, "app.customer": 0, "app.line": 7}
    assert done["rows"] == 27
    assert done["left_out"] == planned["left_out"]
    assert any("foreign key" in one for one in done["left_out"])
    assert "1 large objects on s1" in done["left_out"]
    others = "app.customer, app.event_1, app.event_2, app.purchase, public.item"
    assert f"rows of 5 other tables on s1: {others}" in done["left_out"]


def test_an_unknown_schema_is_refused_by_name(places: TwoPlaces) -> None:
    for words in (["--schema", "nowhere"], ["--schema", "sales", "--schema", "nowhere"], ["--schema", "s*"]):
        refused = places.refuse(*words, to=places.beside)
        assert (refused["code"], refused["error"]) == (2, "usage")
        assert words[-1] in refused["message"]
        assert "app, public, sales" in refused["hint"]


def test_databases_are_not_replaced_by_ones_in_which_other_tables_are_empty(places: TwoPlaces) -> None:
    for words in (["--schema", "sales"], ["--group", "app.line"], ["--group", "app.line=app.row"]):
        refused = places.refuse(*words, "--replace", "--yes", to=places.beside)
        assert (refused["code"], refused["error"]) == (2, "usage")
        assert "all other tables are empty: app.customer, " in refused["message"]
        assert "--data-only" in refused["hint"]
    # All tables match, so only large objects are left out.
    places.restore("--group", "*", "--replace", "--yes", to=places.beside)
    assert 0 not in counts(places.beside).values()


def test_a_table_is_loaded_in_place_and_the_chain_of_the_database_goes_on(places: TwoPlaces) -> None:
    runs = Runs(places.fleet, Ready(places.spark))
    with dropping_slots(places.fleet):
        runs.full("in-place")
        with psycopg.connect(places.fleet.primaries[0].dsn) as connection:
            connection.execute("TRUNCATE ONLY sales.invoice")
        places.restore("--group", "sales.invoice", "--data-only", to=places.fleet, name="in-place")
        # A TRUNCATE and the loaded rows.
        assert runs.increment("in-place").counts["changes"] == 21
    places.restore(to=places.beside, name="in-place")
    assert counts(places.beside) == counts(places.fleet)
    assert counts(places.fleet)["sales.invoice"] == 20
