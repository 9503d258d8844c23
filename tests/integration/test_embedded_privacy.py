"""Another user of the machine reaches no server of an embedded fleet: its superuser runs programs as its account."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest

import cutline.embedded.folder
from cutline.embedded.fleet import EmbeddedFleet, open_fleet, start_fleet, stop_fleet
from cutline.embedded.folder import FolderTakenError
from cutline.embedded.server import FOLDER_BYTES_MAX, running_pid
from tests.other_user import OTHER_UID, as_other_user, needs_root


def try_to_connect(dsns: list[str]) -> dict[str, str]:
    """Try to connect; return the server's or libpq's answer by dsn, "" if the session was opened."""
    answers = {}
    for dsn in dsns:
        try:
            psycopg.connect(dsn, connect_timeout=5).close()
            answers[dsn] = ""
        except psycopg.OperationalError as error:
            answers[dsn] = str(error)
    return answers


def listening_ports(pids: set[int]) -> set[int]:
    """The TCP ports on which one of the processes listens."""
    inodes = set()
    for pid in pids:
        targets = [str(descriptor.readlink()) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    texts = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in texts for line in text.splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in inodes}


@needs_root
def test_another_user_can_not_connect(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    pids = {pid for node in shared_fleet.nodes if (pid := running_pid(node))}
    assert len(pids) == len(shared_fleet.nodes)
    dsns = [node.dsn("postgres") for node in shared_fleet.nodes]
    dsns += [f"postgresql://postgres@127.0.0.1:{port}/postgres" for port in listening_ports(pids)]
    assert set(try_to_connect(dsns).values()) == {""}
    answers = as_other_user(lambda: try_to_connect(dsns), tmp_path / "answers")
    assert [dsn for dsn, answer in answers.items() if not answer] == [], "another user is superuser"
    assert all("Permission denied" in answer for answer in answers.values()), answers


def test_no_server_listens_on_a_port(shared_fleet: EmbeddedFleet) -> None:
    assert listening_ports({pid for node in shared_fleet.nodes if (pid := running_pid(node))}) == set()
    for node in shared_fleet.nodes:
        assert node.folder.stat().st_mode & 0o077 == 0
        with socket.socket(socket.AF_UNIX) as opened:
            opened.connect(str(node.socket))


@pytest.mark.parametrize("name", ["f" * FOLDER_BYTES_MAX, "a,b", "it's a & b"])
def test_a_fleet_starts_in_any_folder(name: str) -> None:
    """Where the path of a socket would be too long, or would name two folders, the sockets alone are elsewhere."""
    with TemporaryDirectory(dir="/tmp") as place:
        # The servers' account can reach it.
        Path(place).chmod(0o755)
        directory = Path(place, name)
        try:
            fleet = start_fleet(directory, shards=1, backups=1, schema=False, settings={"fsync": "off"})
            assert open_fleet(directory) == fleet
            for node in fleet.nodes:
                psycopg.connect(node.dsn("postgres")).close()
                assert node.data_directory.is_relative_to(directory)
                assert node.socket_folder.stat().st_mode & 0o077 == 0
        finally:
            stop_fleet(directory, delete=True)
        assert not any(folder.exists() for node in fleet.nodes for folder in (node.folder.parent, node.socket_folder))
        assert (fleet.places.sockets is None) == (name == "it's a & b")


@needs_root
@pytest.mark.parametrize("planted", ["folder", "file", "link"])
def test_a_fleet_that_another_user_planted_is_not_run_stopped_or_deleted(tmp_path: Path, planted: str) -> None:
    """demo.json names programs to run and folders to delete."""
    directory = tmp_path / "try"
    directory.mkdir()
    victim = tmp_path / "victim"
    (victim / "s1").mkdir(parents=True)
    document = {
        "schema": cutline.embedded.folder.STATE_SCHEMA,
        "complete": True,
        "nodes_directory": str(victim),
        "nodes": [{"id": "s1", "backup_of": None}],
    }
    state = directory / cutline.embedded.folder.STATE
    state.write_text(json.dumps(document))
    if planted == "link":
        state.rename(tmp_path / "theirs")
        state.symlink_to(tmp_path / "theirs")
        os.chown(state, OTHER_UID, OTHER_UID, follow_symlinks=False)
    else:
        os.chown(directory if planted == "folder" else state, OTHER_UID, OTHER_UID)
    for change in (lambda: stop_fleet(directory, delete=True), lambda: start_fleet(directory, shards=1, backups=0)):
        with pytest.raises(FolderTakenError, match="another user"):
            change()
    assert (victim / "s1").exists()


@needs_root
def test_nothing_is_made_in_a_folder_of_another_user(tmp_path: Path) -> None:
    """They could put links there; and what was started could not be stopped, as its state is in a foreign folder."""
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o755)
    os.chown(directory, OTHER_UID, OTHER_UID)
    with pytest.raises(FolderTakenError, match="another user"):
        start_fleet(directory, shards=1, backups=0, schema=False)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_state_that_others_can_write_is_not_read(tmp_path: Path, mode: int) -> None:
    (tmp_path / cutline.embedded.folder.STATE).write_text("{}")
    (tmp_path / cutline.embedded.folder.STATE).chmod(mode)
    with pytest.raises(FolderTakenError, match="another user"):
        stop_fleet(tmp_path)


def test_the_state_and_the_store_are_private(shared_fleet: EmbeddedFleet) -> None:
    for path in (shared_fleet.directory / cutline.embedded.folder.STATE, shared_fleet.store):
        assert (path.stat().st_uid, path.stat().st_mode & 0o077) == (os.geteuid(), 0)
