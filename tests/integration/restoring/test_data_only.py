"""`restore --data-only`: rows and values go into tables that exist, and are as the tables were until it is decided."""

from __future__ import annotations

from tests.commands.in_process import run_here
from tests.integration.restoring.filled import assert_filled, tables_to_fill
from tests.integration.restoring.target_place import NAME, Place


def test_rows_and_values_are_loaded_into_tables_that_stay_as_they_are(place: Place) -> None:
    """Triggers do not act, columns are in another order, and there are more of them."""
    words = ["restore", NAME, "--to", str(place.target.path), "--data-only"]
    with tables_to_fill(place):
        code, planned = run_here(place.fleet, *words, "--dry-run")
        assert code == 0, planned
        code, done = run_here(place.fleet, *words, spark=place.spark)
        assert code == 0, done
        assert_filled(place)
    print(planned)
    print(done)
