"""A shard whose server was upgraded by pg_upgrade, or replaced by another, is copied again; the other shards go on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from msgspec import structs

from cutline.embedded.fleet import start_fleet as start_fleet_of_wheel
from cutline.embedded.fleet import stop_fleet
from cutline.embedded.server import create_standby, delete_server, start_server, stop_server
from cutline.fleet.progress import Silent
from cutline.nodes.baseline import BaselineChangedError
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.operation_records import VALID
from cutline.storage.errors import UsageError
from tests.commands.changing_fleet import ChangingFleet, changing_fleet
from tests.commands.snapshot_runs import Runs, dropping_slots, slots_of
from tests.servers.installed import SERVERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.skipif(not {16, 17, 18} <= SERVERS.keys(), reason="needs PostgreSQL 16, 17 and 18")
SHARD, STANDBY = "s1", "s1-b1"
IN_FOLDER = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')


@pytest.fixture(params=[16])
def place(request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    old = SERVERS[request.param].programs
    try:
        source = start_fleet_of_wheel(tmp_path / "fleet", shards=2, backups=1, programs={SHARD: old})
        target = start_fleet_of_wheel(tmp_path / "target", shards=2, backups=0)
        with changing_fleet(source, target, tmp_path, spark) as found:
            yield found
    finally:
        for name in ("fleet", "target"):
            if (tmp_path / name).exists():
                stop_fleet(tmp_path / name, delete=True)


def next_increment(place: ChangingFleet, **options: tuple[str, ...]) -> Increment:
    place.write()
    commit = place.increment(**options)
    assert isinstance(commit, Increment)
    return commit


def upgrade(place: ChangingFleet) -> None:
    """Upgrade the shard to PostgreSQL 18 by pg_upgrade, which keeps slots from 17 on, and rebuild its standby."""
    node, standby, fleet = place.servers.node(SHARD), place.servers.node(STANDBY), place.servers
    stop_server(standby)
    stop_server(node)
    new = SERVERS[18].programs
    programs = structs.replace(fleet._programs(node), bin_directory=new)
    data, made = node.data_directory, node.folder / "new"
    identity = ["--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=reject", "--username=postgres"]
    programs.run("initdb", "--no-sync", "--no-data-checksums", *identity, f"--pgdata={made}")
    settings = (data / "postgresql.conf").read_text()
    own = [line for line in settings.splitlines() if line and not line.startswith("#")]
    with (made / "postgresql.conf").open("a") as file:
        file.write("\n".join(line for line in own if line.partition(" ")[0] in OWN_SETTINGS) + "\n")
    upgrading = structs.replace(programs, confined=(*IN_FOLDER, str(node.folder)))
    folders = ["--old-datadir", str(data), "--new-datadir", str(made), "--old-bindir", str(node.programs)]
    how = ["--new-bindir", str(new), "--username=postgres", "--socketdir", str(node.folder), "--no-sync"]
    upgrading.run("pg_upgrade", *folders, *how)
    shutil.rmtree(data)
    made.rename(data)
    nodes = tuple(structs.replace(one, programs=new) if one.id in (SHARD, STANDBY) else one for one in fleet.nodes)
    place.servers = structs.replace(fleet, nodes=nodes)
    start_server(programs, place.servers.node(SHARD))
    delete_server(standby)
    create_standby(programs, place.servers.node(STANDBY), place.servers.node(SHARD))
    place.start(STANDBY)


# Those that the fleet's servers were created with.
OWN_SETTINGS = (
    "listen_addresses",
    "port",
    "wal_level",
    "hot_standby_feedback",
    "max_prepared_transactions",
    "max_replication_slots",
    "max_wal_senders",
    "shared_buffers",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "old"), [(16, 16), (17, 17)], indirect=["place"])
def test_an_upgraded_shard_is_copied_again(place: ChangingFleet, old: int) -> None:
    place.runs.full("chain")
    first = next_increment(place)
    upgrade(place)
    # From 17 on, pg_upgrade keeps the chain's slot, whose positions mean nothing on the new server.
    assert len(slots_of(place.fleet.node(SHARD).dsn)) == int(old == 17)
    said = {(one.snapshot, one.node, one.reason) for one in initialise(place.fleet, Silent()).to_copy}
    upgraded = f"its server was upgraded from PostgreSQL {old} to 18"
    assert said == {("chain", SHARD, upgraded), ("chain", STANDBY, upgraded)}
    second = next_increment(place)
    assert initialise(place.fleet, Silent()).to_copy == ()
    assert second.renewed.keys() == {SHARD, STANDBY}
    assert {one.reason for one in second.renewed.values()} == {upgraded}
    assert second.cut.of("s2").position > first.cut.of("s2").position
    assert place.check(since_last=True).result == VALID
    place.execute(SHARD, "ALTER TABLE seen ADD COLUMN more int DEFAULT 7")
    assert not next_increment(place).renewed
    assert place.check().result == VALID
    place.check_restores(1, 3)
    place.check_restores_without(SHARD, 3)


@pytest.mark.timeout(600)
def test_another_server_is_copied_only_if_the_command_says_so(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    with pytest.raises(UsageError, match="--replaced names s2, but it was not replaced"):
        next_increment(place, replaced=("s2",))
    with pytest.raises(UsageError, match="--replaced names s3, which is no shard of the chain"):
        next_increment(place, replaced=("s3",))
    # A dsn that leads to the empty server of another fleet: it cannot be told from a server that was replaced.
    whole, other = place.fleet, place.target.primaries[1]
    others = tuple(
        replace(node, dsn=other.dsn) if node.id == "s2" else node for node in whole.nodes if node.id != "s2-b1"
    )
    place.runs = Runs(replace(whole, nodes=others), place.runs.spark)
    with psycopg.connect(other.dsn, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS seen")
        connection.execute("CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)")
    with pytest.raises(BaselineChangedError, match="node s2: its system identifier was") as refused:
        next_increment(place)
    assert "--incremental --replaced s2" in refused.value.hint
    with dropping_slots(place.fleet):
        place.runs.init()
        third = next_increment(place, replaced=("s2",))
        assert third.renewed.keys() == {"s2"}
        assert "as --replaced says" in third.renewed["s2"].reason
        assert not next_increment(place).renewed
        assert not place.check().conflicts
