"""A search_path means the same after a restore, in whatever way it was set; the right answers are PostgreSQL's."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.restore.ddl.database_ddl import setting_statement
from cutline.restore.ddl.statements import path_elements
from cutline.snapshots.ddl.database_facts import list_elements, read_search_path
from tests.integration.own_shard import database_on

SCHEMAS = ("foo", "Bar", 'a "b", c', "pub", "Ärea")


def schemas_of(dsn: str) -> list[str]:
    """The schemas that a new session finds names in."""
    with psycopg.connect(dsn) as connection:
        (found,) = connection.execute("SELECT current_schemas(false)").fetchone() or ([],)
        return list(found)


@pytest.mark.parametrize(
    "value",
    [
        'Foo, "Bar"',
        'PUB,"foo"',
        '"a ""b"", c" ,Bar',
        'foo ,  "Bar",pub',
        '"$user", foo',
        "",
        '""',
        "$USER, FOO",
        "Ärea, FOO",
    ],
)
def test_a_list_that_was_set_as_a_text_means_the_same(shared_fleet: EmbeddedFleet, tmp_path: Path, value: str) -> None:
    with database_on(shared_fleet, "listed", tmp_path) as fleet:
        dsn = fleet.primaries[0].dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            for schema in SCHEMAS:
                connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(schema)))
            # So the text is stored as it is, with names that have no quotes.
            connection.execute("SELECT set_config('search_path', %s, false)", (value,))
            connection.execute("ALTER DATABASE listed SET search_path FROM CURRENT")
            stored = read_search_path(connection)
            assert stored is not None
            expected = schemas_of(dsn)
            connection.execute(setting_statement("DATABASE listed", "search_path", stored).encode())
            assert schemas_of(dsn) == expected
            elements = ['"$user"' if one == "$user" else one for one in path_elements(stored)]
            if elements:
                connection.execute(f"SET search_path = {', '.join(elements)}".encode())
                (found,) = connection.execute("SELECT current_schemas(false)").fetchone() or ([],)
                assert list(found) == expected


def test_names_of_files_keep_their_letters() -> None:
    assert list_elements('Auto_Explain, "my ""lib"", 2",, ', folds=False) == ["Auto_Explain", 'my "lib", 2']
