"""Every type comes back on every version of PostgreSQL, and on the wheel's if that has the type.

They include XML and lz4 if the server is built with them, which the wheel's is not. Compared with PostgreSQL's own COPY
and pg_dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.restore.targets.obstacles import TargetLacksError
from cutline.storage.errors import RefusedError
from tests.chains.exact_chain import LAST, NAME, OTHER, RESTORED, History, differences
from tests.chains.exact_databases import OtherVersionDatabase
from tests.commands.snapshot_runs import sorted_copies
from tests.integration.refusing import execute
from tests.tables.encoded_tables import dump_ddl

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
LACKING = "exact_lacking"


@pytest.fixture
def versions(history: History) -> OtherVersionDatabase:
    if history.versions is None:
        pytest.skip("there is no server of another version; to install 15 to 18: make servers")
    return history.versions


def test_every_type_comes_back_on_every_version(history: History, versions: OtherVersionDatabase) -> None:
    for increment in RESTORED:
        assert history.assert_same(OTHER, increment) > len(versions.typed)
        if increment in (1, 2):
            assert history.changed_tables("types", increment, OTHER)
    assert ("xml" in {table.type for table in versions.typed}) == ("xml" in versions.has)
    source, back = history.databases[OTHER], history.restored_dsn(OTHER)
    assert differences(*(dump_ddl(dsn).decode().splitlines() for dsn in (back, source))) == []
    assert versions.compressions(back) == versions.compressions(source)
    assert versions.compressions(source) == (["lz4"] if "lz4" in versions.has else ["pglz"])
    assert history.restored[LAST][OTHER].sequences == history.states[LAST][OTHER].sequences


@pytest.fixture
def lacking(history: History, shared_fleet: EmbeddedFleet) -> Iterator[Fleet]:
    """A target whose third database is on a server of the wheel, which is built without XML and lz4."""
    node = shared_fleet.primaries[1]
    try:
        nodes = tuple(Node(OTHER, node.dsn(LACKING)) if one.id == OTHER else one for one in history.target.nodes)
        yield replace(history.target, nodes=nodes)
    finally:
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (LACKING,)).fetchall()
            for (name,) in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def test_a_server_built_without_xml_and_lz4_restores_what_does_not_need_them(
    history: History, versions: OtherVersionDatabase, lacking: Fleet
) -> None:
    source, has = history.databases[OTHER], versions.has
    if "xml" in has:
        message = r"node s3: its PostgreSQL is built without XML support, but the snapshot has XML in own\.papers\.a, "
        # It may also lack extensions, which is another obstacle.
        with pytest.raises(RefusedError, match=message) as refused:
            history.runs.restore(NAME, lacking)
        # Column `e` was added after the full snapshot.
        columns = refused.value.details["columns"]
        assert [name for name in columns if name.startswith("own.")] == [f"own.papers.{column}" for column in "abcde"]
        assert any(name.startswith("types.") for name in columns)
    # The target may also lack some of the extensions.
    with psycopg.connect(source) as connection:
        extensions = connection.execute("SELECT quote_ident(extname) FROM pg_extension WHERE extname <> 'plpgsql'")
        names = ", ".join(name for (name,) in extensions)
    execute(source, "DROP SCHEMA types, own CASCADE", *([f"DROP EXTENSION {names} CASCADE"] if names else []))
    history.runs.increment(NAME)
    if "lz4" in has:
        what = r"node s3: its PostgreSQL is built without lz4, with which columns .* compressed: toast\.t\.squeezed$"
        with pytest.raises(TargetLacksError, match=what):
            history.runs.restore(NAME, lacking)
    else:
        history.runs.restore(NAME, lacking)
        target_dsn = psycopg.conninfo.make_conninfo(lacking.node(OTHER).dsn)
        assert sorted_copies(target_dsn) == sorted_copies(source)
