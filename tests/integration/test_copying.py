"""The first store, its key and the fleet's machines are gone: a copy in S3, its fleet file and its key are enough."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, sorted_copies
from tests.integration.conftest import FleetFactory
from tests.s3.kinds import ONE_KIND, S3Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "daily"
ONE_COPY = '[check]\nallow = ["one-copy"]\n'


def encryption(folder: Path, name: str, digits: str) -> str:
    key = folder / name
    key.write_text(digits * 32)
    key.chmod(0o600)
    return f"[encryption]\nkey_file = {json.dumps(str(key))}\n"


@dataclass
class Stores:
    """A fleet that takes snapshots into a folder, and the same fleet as the file of a second store in S3 describes it.

    `states` are the rows of its shards at each restore point.
    """

    servers: EmbeddedFleet
    first: Runs
    second: Fleet
    folder: Path
    states: list[list[dict[str, bytes]]]

    def take(self) -> None:
        for primary in self.first.fleet.primaries:
            with psycopg.connect(primary.dsn, autocommit=True) as connection:
                connection.execute("INSERT INTO note SELECT n, repeat('x', n % 50) FROM generate_series(1, 2000) n")
                connection.execute("DELETE FROM note WHERE id % 7 = 0")
        self.states.append([sorted_copies(primary.dsn) for primary in self.first.fleet.primaries])
        self.first.increment(NAME) if self.states[1:] else self.first.full(NAME)


@pytest.fixture(params=["encrypted", "plain"])
def stores(fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Stores:
    s3: S3Place = request.getfixturevalue(ONE_KIND)
    servers = fleet_factory(2)
    more = encryption(tmp_path, "second.key", "22") + ONE_COPY
    second = configure_fleet(
        servers, tmp_path / "second.toml", f"{s3.bucket(f'copies-{request.param}')}/shop", s3.options, more
    )
    (tmp_path / "first").mkdir()
    key = encryption(tmp_path / "first", "key", "11") if request.param == "encrypted" else ""
    more = f"{key}[[copy]]\nto = {json.dumps(str(second.path))}\n"
    first = configure_fleet(servers, tmp_path / "first" / "fleet.toml", f"file://{tmp_path}/first/store", more=more)
    for primary in first.primaries:
        with psycopg.connect(primary.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE note (id int, text text)")
            connection.execute("ALTER TABLE note REPLICA IDENTITY FULL")
    made = Stores(servers, Runs(first, Ready(spark)), second, tmp_path, [])
    made.first.init()
    return made


def test_a_copy_restores_the_fleet_when_all_else_is_gone(
    stores: Stores, fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    first, second = stores.first.fleet, stores.second
    with dropping_slots(first):
        stores.take()
        stores.take()
        code, copied = run_here(first, "copy", "--all")
        assert (code, copied["increments"], copied["behind"]) == (0, 2, 0)
        assert copied["bytes"] > 0
        stores.take()
        (state,) = run_here(first, "list")[1]["copies"]
        assert [(one["increment"], one["behind"]) for one in state["snapshots"]] == [(1, 1)]
        code, plan = run_here(first, "copy", NAME, "--dry-run")
        assert (plan["increments"], plan["stores"][0]["snapshots"][0]["through"]) == (1, 1)
        code, copied = run_here(first, "copy", NAME)
        assert (code, copied["increments"], copied["objects"]) == (0, 1, plan["objects"])
        assert run_here(first, "copy", "--all")[1]["objects"] == 0
        assert [one["kind"] for one in run_here(first, "history")[1]["operations"]].count("copy") == 3
        for words in (["create", NAME, "--incremental"], ["create", "other"], ["init"]):
            code, refused = run_here(second, *words, spark=spark)
            assert (code, refused["error"]) == (3, "store-is-copy"), refused
    stop_fleet(stores.servers.directory)
    shutil.rmtree(tmp_path / "first")
    check_second(stores, spark)
    target = fleet_factory(2)
    targets = configure_fleet(target, tmp_path / "targets.toml", f"file://{tmp_path}/unused")
    for increment, state in enumerate(stores.states):
        words = ["restore", NAME, "--increment", str(increment), "--to", str(targets.path), "--replace", "--yes"]
        code, restored = run_here(second, *words, spark=spark)
        assert code == 0, restored
        assert [sorted_copies(primary.dsn) for primary in targets.primaries] == state


def check_second(stores: Stores, spark: SparkSession) -> None:
    """What needs no target works in the second store, without the fleet; so does a copy of the copy."""
    second = stores.second
    code, checked = run_here(second, "check", NAME, spark=spark)
    assert [one["conflicts"] for one in checked["snapshots"]] == [[]]
    assert (code, checked["result"]) == (0, "one-copy")
    assert "complete" in run_as_text(second, "list")
    assert run_here(second, "show", NAME)[1]["increments"][-1]["number"] == 2
    third = configure_fleet(
        stores.servers, stores.folder / "third.toml", f"file://{stores.folder}/third",
        more=encryption(stores.folder, "third.key", "33"),
    )  # fmt: skip
    assert run_here(second, "copy", NAME, "--to", str(third.path))[1]["increments"] == 3
    assert read_chain(third.store.open(), NAME) == read_chain(second.store.open(), NAME)
    code, deleted = run_here(third, "delete", NAME, "--force", "--yes")
    assert (code, deleted["snapshot"]) == (0, NAME)
    assert run_here(third, "gc", "--yes")[1]["garbage"] == []
