"""A database whose collation version differs from its library's: the server warns of it whenever a session begins."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.progress import Noting, Silent
from snapshots.create.full_plan import preview_full
from snapshots.create.initialise import initialise
from snapshots.create.request import CreateRequest
from tests.integration.own_shard import database_on
from wal.drain.peek import open_reader

DIFFERENT = "UPDATE pg_database SET datcollversion = '1.old' WHERE datname = current_database()"


@pytest.fixture(scope="module")
def differing(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with database_on(shared_fleet, "collated", tmp_path_factory.mktemp("collated")) as fleet:
        with psycopg.connect(fleet.primaries[0].dsn) as connection:
            connection.execute("CREATE TABLE item (id int PRIMARY KEY)")
            connection.execute(DIFFERENT)
        yield fleet


def actual_version(dsn: str) -> str:
    """The version of the library's collation."""
    with psycopg.connect(dsn) as connection:
        (actual,) = connection.execute(
            "SELECT coalesce(pg_database_collation_actual_version(oid), 'none') FROM pg_database"
            " WHERE datname = current_database()"
        ).fetchone() or ("",)
        return str(actual)


def test_it_is_said_once_in_our_own_words_and_never_by_libpq(
    differing: Fleet, capfd: pytest.CaptureFixture[str]
) -> None:
    (primary,) = differing.primaries
    actual, noting = actual_version(primary.dsn), Noting(Silent())
    initialise(differing, noting)
    ours = [one for one in noting.notes if "collation version" in one]
    # Once: what mends it on the primary reaches its standbys.
    assert ours == [
        f"node {primary.id}: database collated was made with collation version 1.old, its server's library has"
        f" {actual}:"
        ' indexes over text may be in another order; in that database: REINDEX DATABASE "collated"; ALTER DATABASE'
        ' "collated" REFRESH COLLATION VERSION;'
    ]
    again = Noting(Silent())
    preview_full(differing, CreateRequest("daily"), again)
    assert [one for one in again.notes if "collation version" in one] == ours
    with open_reader(primary), open_reader(primary):
        pass
    assert "WARNING" not in capfd.readouterr().err
