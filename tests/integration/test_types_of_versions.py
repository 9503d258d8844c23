"""Every type comes back on every version of PostgreSQL, and on the wheel's where that has it.

XML and lz4 among them, where the server is built with them: the wheel's is not. Judged by PostgreSQL's own COPY and
pg_dump.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from fleet.config import Node
from fleet.nodes.connections import with_database
from restore.ddl import SchemaLoadError
from restore.target import TargetUnfitError
from tests.integration.encoded_tables import dumped
from tests.integration.mixed_databases import await_standbys, create_database, slots_dropped
from tests.integration.refusing import execute
from tests.integration.toasted_tables import SCHEMA as TOAST_SCHEMA
from tests.integration.toasted_tables import toasted
from tests.integration.typed_tables import Typed, changes_of, create_typed
from tests.integration.typed_tables import run as run_changes
from tests.other_servers import OTHERS, has_lz4, has_xml, needed
from tests.snapshot_runs import Ready, Runs, described, sorted_copies

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "typed"
LACKING = "typed_lacking"
# XML within other types, where a server reads it at all.
XML_WITHIN = (
    "CREATE DOMAIN own.paper AS xml", "CREATE DOMAIN own.thin AS own.paper", "CREATE TYPE own.page AS (n int, x xml[])",
    "CREATE DOMAIN own.pages AS own.page[]",
    "CREATE TABLE own.papers (id int PRIMARY KEY, gone xml, a own.thin, n int, b own.pages, c own.paper[], d xml)",
    "ALTER TABLE own.papers DROP gone",
    "INSERT INTO own.papers VALUES (1, '<a>&amp;</a>', 2,"
    """ ARRAY[(3, '{<b/>,"<c d=\\"e\\"/>"}')::own.page], '{<f/>}', '<g/>')""",
)  # fmt: skip


@pytest.fixture(scope="module", params=OTHERS, ids=str)
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A shard of another version than the wheel's, and its standby."""
    directory = tmp_path_factory.mktemp("typed") / "fleet"
    try:
        yield start_fleet(directory, shards=1, backups=1, schema=False, programs={"s1": needed(request.param)})
    finally:
        if is_fleet(directory):
            stop_fleet(directory, delete=True)


def test_every_type_comes_back_on_every_version(
    shard: EmbeddedFleet, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    own = described(shard, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    create_database(shard.primaries[0].dsn("postgres"), "typed", "UTF8")
    fleet = replace(own, nodes=tuple(with_database(node, "typed") for node in own.nodes))
    runs, (source,) = Runs(fleet, Ready(spark)), fleet.primaries
    typed, has = fill_typed(source.dsn)
    await_standbys(shard)
    with slots_dropped(fleet):
        runs.init()
        runs.full(NAME)
        states = [sorted_copies(source.dsn)]
        for number in (1, 2):
            change_typed(source.dsn, typed, number)
            if number == 2 and "xml" in has:
                execute(source.dsn, "ALTER TABLE own.papers ADD e own.paper")
            runs.increment(NAME)
            states.append(sorted_copies(source.dsn))
        target = replace(fleet, nodes=(with_database(source, "typed_back"),))
        for number in (0, 2):
            runs.restore(NAME, target, number)
            state, found = states[number], sorted_copies(target.nodes[0].dsn)
            assert found.keys() == state.keys()
            assert [table for table in state if found[table] != state[table]] == [], f"increment {number}"
        assert dumped(target.nodes[0].dsn) == dumped(source.dsn)
        assert compressions(target.nodes[0].dsn) == compressions(source.dsn)
        assert runs.check_one(NAME).conflicts == []
        with lacking_in(shared_fleet) as lacking:
            assert_lacking_is_refused(runs, lacking, has)


def fill_typed(dsn: str) -> tuple[list[Typed], set[str]]:
    """A table of every type, and values that are compressed by what there is; which of xml and lz4 there is."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        has = {name for name, there in (("xml", has_xml), ("lz4", has_lz4)) if there(connection)}
        typed = create_typed(connection)
        connection.execute("RESET search_path")
        first = toasted(0)
        if "lz4" in has:
            first.insert(len(TOAST_SCHEMA), "ALTER TABLE toast.t ALTER squeezed SET COMPRESSION lz4")
        for statement in (*first, *XML_WITHIN * ("xml" in has)):
            connection.execute(statement.encode())
    assert ("xml" in {table.type for table in typed}) == ("xml" in has)
    assert compressions(dsn) == (["lz4"] if "lz4" in has else ["pglz"])
    return typed, has


def change_typed(dsn: str, typed: list[Typed], increment: int) -> None:
    with psycopg.connect(dsn, autocommit=True, options="-c search_path=pg_catalog,ext") as connection:
        for table in typed:
            run_changes(connection, changes_of(table, increment))
        for statement in toasted(increment):
            connection.execute(statement.encode())


def compressions(dsn: str) -> list[str]:
    """How the values that repeat themselves are compressed."""
    query = "SELECT DISTINCT pg_column_compression(squeezed) FROM toast.t WHERE squeezed IS NOT NULL"
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(query)]


@contextmanager
def lacking_in(servers: EmbeddedFleet) -> Iterator[Node]:
    """A database that is not there yet, of a server of the wheel, which reads no XML and knows no lz4."""
    node = servers.primaries[0]
    try:
        yield Node("s1", node.dsn(LACKING))
    finally:
        with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
            names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (LACKING,)).fetchall()
            for (name,) in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def assert_lacking_is_refused(runs: Runs, lacking: Node, has: set[str]) -> None:
    """A server that lacks what the source is built with takes what does not need it."""
    there = replace(runs.fleet, nodes=(lacking,))
    if "xml" in has:
        said = r"node s1: its PostgreSQL is built without XML support, but the snapshot has XML in own\.papers\.a, "
        with pytest.raises(TargetUnfitError, match=said) as refused:
            runs.restore(NAME, there)
        # `e` came after the full snapshot.
        columns = refused.value.details["columns"]
        assert [name for name in columns if name.startswith("own.")] == [f"own.papers.{column}" for column in "abcde"]
        assert any(name.startswith("types.") for name in columns)
    # Nor has it all of the extensions, maybe.
    (source,) = runs.fleet.primaries
    with psycopg.connect(source.dsn) as connection:
        extensions = connection.execute("SELECT quote_ident(extname) FROM pg_extension WHERE extname <> 'plpgsql'")
        names = ", ".join(name for (name,) in extensions)
    execute(source.dsn, "DROP SCHEMA types, own CASCADE", *([f"DROP EXTENSION {names} CASCADE"] if names else []))
    runs.increment(NAME)
    if "lz4" in has:
        with pytest.raises(SchemaLoadError, match=r"node s1: .*compression method lz4 not supported"):
            runs.restore(NAME, there)
    else:
        runs.restore(NAME, there)
        assert sorted_copies(there.nodes[0].dsn) == sorted_copies(source.dsn)
