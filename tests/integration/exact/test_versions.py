"""Every type comes back on every version of PostgreSQL, and on the wheel's where that has it.

XML and lz4 among them, where the server is built with them: the wheel's is not. Judged by PostgreSQL's own COPY and
pg_dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, Node
from restore.ddl import SchemaLoadError
from restore.target import TargetUnfitError
from tests.chains.exact_chain import LAST, NAME, OTHER, RESTORED, History, differences
from tests.chains.exact_databases import Versions
from tests.integration.refusing import execute
from tests.snapshot_runs import sorted_copies
from tests.tables.encoded_tables import dumped

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(900)
LACKING = "exact_lacking"


@pytest.fixture
def versions(history: History) -> Versions:
    if history.versions is None:
        pytest.skip("there is no server of another version; tests/other_servers.py says how to name one")
    return history.versions


def test_every_type_comes_back_on_every_version(history: History, versions: Versions) -> None:
    for increment in RESTORED:
        assert history.assert_same(OTHER, increment) > len(versions.typed)
        if increment in (1, 2):
            assert history.changed("types", increment, OTHER)
    assert ("xml" in {table.type for table in versions.typed}) == ("xml" in versions.has)
    source, back = history.databases[OTHER], history.back(OTHER)
    assert differences(*(dumped(dsn).decode().splitlines() for dsn in (back, source))) == []
    assert versions.compressions(back) == versions.compressions(source)
    assert versions.compressions(source) == (["lz4"] if "lz4" in versions.has else ["pglz"])
    assert history.restored[LAST][OTHER].sequences == history.states[LAST][OTHER].sequences


@pytest.fixture
def lacking(history: History, shared_fleet: EmbeddedFleet) -> Iterator[Fleet]:
    """A target whose third database is on a server of the wheel, which reads no XML and knows no lz4."""
    node = shared_fleet.primaries[1]
    try:
        nodes = tuple(Node(OTHER, node.dsn(LACKING)) if one.id == OTHER else one for one in history.target.nodes)
        yield replace(history.target, nodes=nodes)
    finally:
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (LACKING,)).fetchall()
            for (name,) in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def test_a_server_that_lacks_what_the_source_is_built_with_takes_what_does_not_need_it(
    history: History, versions: Versions, lacking: Fleet
) -> None:
    source, has = history.databases[OTHER], versions.has
    if "xml" in has:
        said = r"node s3: its PostgreSQL is built without XML support, but the snapshot has XML in own\.papers\.a, "
        with pytest.raises(TargetUnfitError, match=said) as refused:
            history.runs.restore(NAME, lacking)
        # `e` came after the full snapshot.
        columns = refused.value.details["columns"]
        assert [name for name in columns if name.startswith("own.")] == [f"own.papers.{column}" for column in "abcde"]
        assert any(name.startswith("types.") for name in columns)
    # Nor has it all of the extensions, maybe.
    with psycopg.connect(source) as connection:
        extensions = connection.execute("SELECT quote_ident(extname) FROM pg_extension WHERE extname <> 'plpgsql'")
        names = ", ".join(name for (name,) in extensions)
    execute(source, "DROP SCHEMA types, own CASCADE", *([f"DROP EXTENSION {names} CASCADE"] if names else []))
    history.runs.increment(NAME)
    if "lz4" in has:
        with pytest.raises(SchemaLoadError, match=r"node s3: .*compression method lz4 not supported"):
            history.runs.restore(NAME, lacking)
    else:
        history.runs.restore(NAME, lacking)
        there = psycopg.conninfo.make_conninfo(lacking.node(OTHER).dsn)
        assert sorted_copies(there) == sorted_copies(source)
