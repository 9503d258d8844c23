"""A store that an earlier version wrote is read by this one: restored, checked, listed (docs/release.md).

If this fails after a format has changed: before version 1.0.0 `make kept` writes the stores anew; from 1.0.0 on this
version has to read them as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.connections import with_database
from cutline.snapshots.records.documents import seal
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.refusing import execute
from tests.kept.stores import (
    CHAIN,
    DELETED,
    FLEET,
    INCREMENTS,
    KEPT,
    KEY,
    RESTORE_POINT,
    STORES,
    encryption_of,
    expected_rows,
)
from tests.run.quick_spark import with_spark
from tests.stores.documents import kind_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PREFIX = "kept_"


def opened(embedded: EmbeddedFleet, folder: Path, store: str) -> Fleet:
    """The fleet of a copy of a kept store, whose nodes have other servers now."""
    shutil.copytree(KEPT / store, folder / "store")
    key = folder / "key"
    shutil.copy(KEY, key)
    key.chmod(0o600)
    text = re.sub(r"(?m)^name = .*$", f"name = {json.dumps(FLEET)}", embedded.fleet_toml.read_text())
    text = re.sub(r"(?m)^store = .*$", f"store = {json.dumps(f'file://{folder}/store')}", text)
    path = folder / "fleet.toml"
    path.write_text(f"{text}\n{encryption_of(store, key)}{with_spark('')}\n")
    return load_fleet(path)


@pytest.fixture(scope="module", params=STORES)
def kept(
    request: pytest.FixtureRequest, shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    """A copy of a kept store."""
    return opened(shared_fleet, tmp_path_factory.mktemp("kept"), request.param)


@pytest.fixture
def target(kept: Fleet) -> Iterator[Fleet]:
    """Databases that the restore creates, dropped at the end."""
    nodes = tuple(with_database(node, f"{PREFIX}{node.id}") for node in kept.primaries)
    yield replace(kept, nodes=nodes)
    for node in kept.primaries:
        maintenance = with_database(node, "postgres").dsn
        with psycopg.connect(maintenance) as connection:
            names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (PREFIX,)).fetchall()
        for (name,) in names:
            execute(maintenance, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.mark.parametrize("increment", range(INCREMENTS + 1))
def test_every_restore_point_of_a_kept_store_is_restored(
    kept: Fleet, target: Fleet, spark: SparkSession, increment: int
) -> None:
    Runs(kept, Ready(spark)).restore(CHAIN, target, increment)
    store = "encrypted" if "[encryption]" in kept.path.read_text() else "plain"
    expected = expected_rows(store, increment)
    for node in target.nodes:
        assert {name: body.decode() for name, body in sorted_copies(node.dsn).items()} == expected[node.id]
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute("SELECT lo_get(4711)").fetchone() == (b"\xca\xfe",)


def test_a_kept_store_is_valid(kept: Fleet, spark: SparkSession) -> None:
    code, document = run_here(kept, "check", spark=spark)
    assert code == 0, document


def test_a_kept_store_is_listed(kept: Fleet) -> None:
    code, document = run_here(kept, "list")
    assert code == 0
    listed = {one["name"]: one for one in document["snapshots"]}
    assert set(listed) == {CHAIN, RESTORE_POINT}
    assert len(listed[CHAIN]["increments"]) == INCREMENTS
    assert all("problem" not in one or not one["problem"] for one in listed.values())
    assert run_here(kept, "history")[0] == 0
    assert run_here(kept, "show", DELETED)[1]["error"] == "snapshot-deleted"
    code, plan = run_here(kept, "show", RESTORE_POINT, "--recovery-plan")
    assert code == 0
    assert plan["recovery_plan"]


def test_a_document_of_a_newer_format_is_refused_by_name(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    fleet = opened(shared_fleet, tmp_path, "plain")
    key = f"snapshots/{CHAIN}/increments/{1:016}.json"
    path = tmp_path / "store" / key
    document = json.loads(path.read_bytes())
    name, _, number = document["schema"].rpartition("/")
    path.chmod(0o600)
    path.write_bytes(seal(document | {"schema": f"{name}/{int(number) + 1}"}))
    code, error = run_here(fleet, "restore", CHAIN, "--dry-run")
    assert code == 3
    assert key in error["message"]
    assert "a newer version of Cutline may have written it" in error["hint"]


def test_the_kept_stores_have_documents_of_most_kinds() -> None:
    """A kind that neither store has is not kept; those of a command that is running or was lost can't be."""
    found = {
        kind.name
        for store in STORES
        for path in (KEPT / store).rglob("*.json")
        if (kind := kind_of(path.relative_to(KEPT / store).as_posix()))
    }
    assert found >= {"fleet", "baseline", "snapshot", "increment", "deleted", "intent", "outcome", "key"}
