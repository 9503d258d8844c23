"""A database whose collation version differs from its library's: the server warns of it whenever a session begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.collation_versions import _read, difference_text
from cutline.nodes.connections import with_database
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import preview_full
from cutline.snapshots.create.initialise import initialise
from cutline.wal.drain.peek import open_reader
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.run.soak import first
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

BY_HAND = (
    "as a superuser: UPDATE pg_database SET datcollversion = pg_database_collation_actual_version(oid)"
    " WHERE datname = current_database();"
)
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
        f"node {primary.id}: database collated was created with collation version 1.old, but its server's library"
        f" provides {actual}:"
        ' indexes on text may be in the wrong order; in that database, run: REINDEX DATABASE "collated"; '
        + (BY_HAND if actual == "none" else 'ALTER DATABASE "collated" REFRESH COLLATION VERSION;')
    ]
    again = Noting(Silent())
    preview_full(differing, CreateRequest("daily"), again)
    assert [one for one in again.notes if "collation version" in one] == ours
    with open_reader(primary), open_reader(primary):
        pass
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.parametrize("major", first(MAJORS))
def test_what_it_says_can_be_typed_and_ends_it(tmp_path: Path, major: int) -> None:
    """Also where the data directory came from a library without versions, or has come to one."""
    cases = (
        ("icu ICU_LOCALE 'en'", "'1.old'", 'ALTER DATABASE "mended" REFRESH COLLATION VERSION;'),
        ("icu ICU_LOCALE 'en'", "NULL", BY_HAND),
        ("libc", "'1.old'", BY_HAND),
    )
    with fleet_of(tmp_path / "fleet", [require_server(major, icu=True)], schema=False) as servers:
        node = Node("s1", servers.primaries[0].dsn("mended"))
        maintenance = with_database(node, "postgres").dsn
        for provider, recorded, statement in cases:
            execute(maintenance, f"CREATE DATABASE mended TEMPLATE template0 LOCALE 'C' LOCALE_PROVIDER {provider}")
            assert text_of(node) == ""
            execute(maintenance, f"UPDATE pg_database SET datcollversion = {recorded} WHERE datname = 'mended'")
            said = text_of(node)
            assert said.endswith(f'in that database, run: REINDEX DATABASE "mended"; {statement}'), said
            typed = said.partition("in that database, run: ")[2].replace("as a superuser: ", "")
            with psycopg.connect(node.dsn, autocommit=True) as connection:
                for one in typed.removesuffix(";").split(";"):
                    connection.execute(one.encode())
            assert text_of(node) == ""
            execute(maintenance, "DROP DATABASE mended")


def text_of(node: Node) -> str:
    with psycopg.connect(node.dsn) as connection:
        found = _read(connection)
    return difference_text(node, {node.id: found}) if found else ""
