from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet, NoFleetError, is_fleet, open_fleet, start_fleet, stop_fleet
from cutline.embedded.folder import EmbeddedFleetBusyError, FolderTakenError, lock_folder
from cutline.embedded.server import EmbeddedNode, ServerFailedError, running_pid
from cutline.fleet.config import Fleet, load_fleet
from cutline.nodes.baseline import find_node
from cutline.nodes.connections import connect
from cutline.storage.errors import RefusedError
from tests.commands.in_process import run_here
from tests.servers.disasters import kill_server, rebuild_shard
from tests.servers.installed import SERVERS

WAIT_SECONDS_MAX = 30
SHAPE = {"shards": 2, "backups": 1}


def pids(fleet: EmbeddedFleet) -> dict[str, int | None]:
    return {node.id: running_pid(node) for node in fleet.nodes}


def system_identifiers(fleet: Fleet) -> dict[str, str]:
    """Read the identifier of every node in fleet.toml, and assert that its role is the one described there."""
    identifiers = {}
    for node in fleet.nodes:
        with connect(node) as connection:
            identity = find_node(node, connection).identity
        assert identity.in_recovery == (node.backup_of is not None), identity
        identifiers[node.id] = identity.system_identifier
    return identifiers


def value(node: EmbeddedNode, query: str, database: str = "bank") -> object:
    with psycopg.connect(node.dsn(database), autocommit=True) as connection:
        row = connection.execute(query).fetchone()
    return row[0] if row else None


def eventually(claim: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_replicating(primary: EmbeddedNode, backup: EmbeddedNode, database: str = "bank") -> bool:
    """Whether a row written on the primary reaches its standby."""
    with psycopg.connect(primary.dsn(database), autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS seen (n int)")
        connection.execute("INSERT INTO seen VALUES (1)")
    count = value(primary, "SELECT count(*) FROM seen", database)
    return eventually(
        lambda: (
            value(backup, "SELECT to_regclass('seen') IS NOT NULL", database) is True
            and value(backup, "SELECT count(*) FROM seen", database) == count
        )
    )


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """A folder that the servers' account can reach."""
    with tempfile.TemporaryDirectory(prefix="cutline-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder / "demo"


@pytest.fixture(scope="module")
def fleet_directory(directory: Path) -> Iterator[Path]:
    """The folder of a running fleet that the tests of this module may damage; each leaves it complete."""
    try:
        start_fleet(directory, **SHAPE, settings={"fsync": "off"})
        yield directory
    finally:
        stop_fleet(directory, delete=True)
    assert list(directory.iterdir()) == []


@pytest.fixture
def fleet(fleet_directory: Path) -> EmbeddedFleet:
    return open_fleet(fleet_directory)


def test_fleet_toml_describes_the_servers_that_run(shared_fleet: EmbeddedFleet) -> None:
    fleet = load_fleet(shared_fleet.fleet_toml)
    assert [node.id for node in fleet.nodes] == ["s1", "s2", "s1-b1", "s2-b1"]
    found = system_identifiers(fleet)
    assert found["s1"] == found["s1-b1"] != found["s2"] == found["s2-b1"]


def test_starting_a_running_fleet_changes_nothing(shared_fleet: EmbeddedFleet) -> None:
    before = pids(shared_fleet), shared_fleet.fleet_toml.read_text()
    assert start_fleet(shared_fleet.directory, shards=2, backups=1) == shared_fleet
    assert (pids(shared_fleet), shared_fleet.fleet_toml.read_text()) == before


def test_another_shape_is_refused(shared_fleet: EmbeddedFleet) -> None:
    before = pids(shared_fleet)
    with pytest.raises(FolderTakenError, match="a fleet with different nodes"):
        start_fleet(shared_fleet.directory, shards=3, backups=1)
    assert pids(shared_fleet) == before


def test_programs_for_a_fleet_that_exists_are_refused_with_the_version_that_stands(shared_fleet: EmbeddedFleet) -> None:
    before, fleet = pids(shared_fleet), load_fleet(shared_fleet.fleet_toml)
    others = [server.programs for server in SERVERS.values() if server.programs != shared_fleet.nodes[0].programs]
    if not others:
        pytest.skip("no other servers are installed")
    folder, given = str(shared_fleet.directory), ("--postgresql", str(others[0]))
    major = int(str(value(shared_fleet.primaries[0], "SHOW server_version_num"))) // 10000
    code, document = run_here(fleet, "demo", "up", folder, *given)
    assert (code, document["error"]) == (3, "folder-taken")
    assert document["message"].startswith(f"{folder} contains a PostgreSQL {major} fleet, which runs the programs ")
    # The option of the story alone, which `up` does not get.
    code, document = run_here(fleet, "demo", *given, "up", folder)
    assert (code, document["hint"]) == (2, f"put it after up: snapshot demo up DIR --postgresql {others[0]}")
    assert pids(shared_fleet) == before


def test_one_process_at_a_time_changes_a_fleet(shared_fleet: EmbeddedFleet) -> None:
    with lock_folder(shared_fleet.directory), pytest.raises(EmbeddedFleetBusyError):
        stop_fleet(shared_fleet.directory)
    assert len(shared_fleet.running()) == len(shared_fleet.nodes)


def test_the_servers_data_is_in_the_fleets_own_folder_if_their_account_can_reach_it(
    fleet: EmbeddedFleet, directory: Path
) -> None:
    assert fleet.places.nodes == (directory / "nodes").resolve()


def test_a_process_that_reuses_a_dead_servers_pid_is_left_alone(fleet: EmbeddedFleet) -> None:
    for node in fleet.nodes:
        kill_server(node)
    assert fleet.running() == ()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        pid_file = fleet.node("s1").data_directory / "postmaster.pid"
        lines = pid_file.read_text().split("\n")
        pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]))
        assert fleet.running() == ()
        assert stop_fleet(fleet.directory) == 0
        assert len(start_fleet(fleet.directory, **SHAPE).running()) == len(fleet.nodes)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_killed_fleet_keeps_everything_committed_or_prepared(fleet: EmbeddedFleet) -> None:
    primary, backup = fleet.node("s1"), fleet.node("s1-b1")
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        connection.execute("UPDATE account SET balance = 5 WHERE id = 1")
        connection.execute("BEGIN")
        connection.execute("UPDATE account SET balance = 6 WHERE id = 2")
        connection.execute("PREPARE TRANSACTION 'kept'")
    for node in fleet.nodes:
        kill_server(node)
    assert fleet.running() == ()
    again = start_fleet(fleet.directory, **SHAPE)
    assert again == fleet
    assert value(primary, "SELECT balance FROM account WHERE id = 1") == 5
    assert value(primary, "SELECT gid FROM pg_prepared_xacts") == "kept"
    assert is_replicating(primary, backup)


def test_what_the_user_adds_to_fleet_toml_is_kept(fleet: EmbeddedFleet) -> None:
    identifiers = system_identifiers(load_fleet(fleet.fleet_toml))
    assert stop_fleet(fleet.directory) == len(fleet.nodes)
    described = fleet.fleet_toml.read_text() + "# a line of the user's\n"
    fleet.fleet_toml.write_text(described)
    assert start_fleet(fleet.directory, **SHAPE) == fleet
    assert fleet.fleet_toml.read_text() == described
    assert system_identifiers(load_fleet(fleet.fleet_toml)) == identifiers
    assert is_replicating(fleet.node("s1"), fleet.node("s1-b1"))


def test_a_deleted_node_is_named_and_its_rebuilt_shard_is_a_new_system_without_the_database(
    fleet: EmbeddedFleet,
) -> None:
    primary, backup = fleet.node("s2"), fleet.node("s2-b1")
    query = "SELECT system_identifier::text FROM pg_control_system()"
    was = value(primary, query)
    fleet.delete_node_data(primary)
    assert [node.id for node in fleet.running()] == ["s1", "s1-b1", "s2-b1"]
    before = pids(fleet)
    with pytest.raises(RefusedError, match="data of s2 is missing"):
        start_fleet(fleet.directory, **SHAPE)
    assert pids(fleet) == before
    rebuild_shard(fleet, primary)
    after = value(primary, query, "postgres")
    assert was != after == value(backup, query, "postgres")
    assert value(primary, "SELECT count(*) FROM pg_database WHERE datname = 'bank'", "postgres") == 0


def test_a_fleet_that_can_not_be_started_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    with pytest.raises(ServerFailedError, match="node s1: its server did not start") as failed:
        start_fleet(directory, shards=1, backups=1, settings={"shared_buffers": "nonsense"})
    assert "shared_buffers" in f"{failed.value.message} {failed.value.hint} {failed.value.details}"
    assert not is_fleet(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("folder", ["/proc/fleet", "/sys/fleet", "/sys/kernel"])
def test_a_folder_in_which_nothing_can_be_created_is_named(folder: str) -> None:
    """Not even root can create files there."""
    with pytest.raises(FolderTakenError, match=f"^{folder}: ") as raised:
        start_fleet(Path(folder), shards=1, backups=0)
    assert "different folder" in raised.value.hint


def test_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    theirs = tmp_path / "fleet.toml"
    theirs.write_text("name = 'production'\n")
    with pytest.raises(FolderTakenError, match=re.escape(str(theirs))):
        start_fleet(tmp_path, shards=1, backups=0)
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.toml"]
    with pytest.raises(NoFleetError):
        stop_fleet(tmp_path, delete=True)
    assert theirs.read_text() == "name = 'production'\n"


def test_stopping_a_fleet_leaves_other_fleets_running_and_its_snapshots_in_place(
    fleet: EmbeddedFleet, tmp_path: Path
) -> None:
    """The folder is private. If root made it, it stays private, and the servers' data is elsewhere."""
    others = pids(fleet)
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    directory = home / "demo"
    settings = {"max_prepared_transactions": "7", "fsync": "off"}
    try:
        mine = start_fleet(directory, shards=1, backups=1, schema=False, settings=settings)
        assert [node.id for node in load_fleet(mine.fleet_toml).nodes] == ["s1", "s1-b1"]
        for node in mine.nodes:
            databases = "SELECT array_agg(datname ORDER BY datname)::text[] FROM pg_database"
            assert value(node, databases, "postgres") == ["postgres", "template0", "template1"]
            # The primary's settings apply to its standby, too.
            assert value(node, "SELECT current_setting('max_prepared_transactions')", "postgres") == "7"
        assert open_fleet(directory) == mine
        if os.geteuid() == 0:
            assert_private(home, mine)
        assert is_replicating(*mine.nodes, "postgres")
        assert stop_fleet(directory) == 2
        assert stop_fleet(directory) == 0
        assert mine.running() == ()
        assert pids(fleet) == others
        assert len(start_fleet(directory, shards=1, backups=1).running()) == 2
        (mine.store / "fleet.json").write_text("{}")
    finally:
        stop_fleet(directory, delete=True)
    assert [path.name for path in directory.iterdir()] == ["store"]
    assert not mine.places.nodes.exists()


def assert_private(home: Path, fleet: EmbeddedFleet) -> None:
    """Root runs its servers under another account, which can't read root's private folders."""
    assert home.stat().st_mode & 0o777 == 0o700
    assert home.stat().st_uid == 0
    assert not fleet.places.nodes.is_relative_to(home)
    assert fleet.node("s1").data_directory.stat().st_uid != 0
