"""`watch` reads fleet.toml again when it has changed, and goes on with the old one while it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cutline.cli.watch.fleet_source import MISSING_TIMES, FleetSource
from cutline.fleet.config import FleetFileError
from cutline.snapshots.records.store_identity import IdentityLostError, StoreNotInitialisedError, ensure_identity
from cutline.storage.errors import UsageError
from cutline.storage.local import LocalStore
from cutline.wal.segments.own_store import StoreGoneError

FILE = """
name = "shop"
store = "file:///backups"
{watch}
[[node]]
id = "a"
dsn = "postgresql:///a"
"""
RULES = '[watch]\nevery = "5min"\n'


def write(path: Path, watch: str = RULES) -> None:
    path.write_text(FILE.format(watch=watch))


def saying() -> tuple[list[str], Callable[..., None]]:
    """What is said, and what says it."""
    said: list[str] = []

    def say(text: str, **_: object) -> None:
        said.append(text)

    return said, say


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    write(path)
    return path


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(file: Path) -> None:
    said, say = saying()
    source = FleetSource.read(file)
    assert not source.reload(say)
    write(file, RULES.replace("5min", "1h"))
    assert source.reload(say)
    assert (source.rules.every, len(said)) == (3600, 1)


@pytest.mark.parametrize("watch", ["", "[watch", '[watch]\nevery = "soon"\n', '[watch]\nevery = "1s"\n'])
def test_a_file_that_is_wrong_or_has_no_schedule_is_not_taken(file: Path, watch: str) -> None:
    said, say = saying()
    source = FleetSource.read(file)
    write(file, watch)
    assert not source.reload(say)
    assert source.rules.every == 300
    assert said[0].endswith("the watch continues with the previous file")
    # It is said once.
    assert not source.reload(say)
    assert len(said) == 1


def test_a_file_that_is_being_replaced_is_read_when_it_is_there(file: Path) -> None:
    source = FleetSource.read(file)
    file.unlink()
    assert not source.reload(saying()[1])
    write(file, RULES.replace("5min", "1h"))
    assert source.reload(saying()[1])


def test_another_store_needs_another_watch(file: Path) -> None:
    said, say = saying()
    source = FleetSource.read(file)
    file.write_text(file.read_text().replace("/backups", "/elsewhere"))
    assert not source.reload(say)
    assert "now names another fleet or store than this watch serves" in said[0]


def test_without_a_schedule_there_is_no_watch(file: Path) -> None:
    write(file, "")
    with pytest.raises(UsageError, match=r"does not contain \[watch\]"):
        FleetSource.read(file)


@pytest.mark.parametrize("name", ["nightly", "nightly-{date}"])
def test_the_name_has_to_differ_between_two_of_one_day(file: Path, name: str) -> None:
    write(file, f'{RULES}name = "{name}"\n')
    with pytest.raises(UsageError, match="one name per day"):
        FleetSource.read(file)


def test_nothing_is_more_often_than_increments(file: Path) -> None:
    write(file, f'{RULES}check = "1min"\n')
    with pytest.raises(FleetFileError, match=r"`watch\.check` runs more often than `watch\.every`"):
        FleetSource.read(file)


def test_what_is_wrong_with_the_file_is_known_until_it_is_right(file: Path) -> None:
    say = saying()[1]
    source = FleetSource.read(file)
    for watch, is_wrong in (("[watch", True), (RULES, False)):
        write(file, watch)
        source.reload(say)
        assert (source.problem is not None) is is_wrong
    file.unlink()
    for _ in range(MISSING_TIMES):
        source.reload(say)
    assert source.problem is not None
    write(file)
    source.reload(say)
    assert source.problem is None


def test_a_command_that_could_tell_nobody_is_refused(file: Path) -> None:
    write(file, f'{RULES}[notify]\ncommand = ["/nowhere/page"]\n')
    with pytest.raises(UsageError, match="/nowhere/page is not a program on this machine"):
        FleetSource.read(file)


def test_a_store_that_is_gone_or_another_one_is_none_to_work_with(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    file.write_text(file.read_text().replace("file:///backups", f"file://{folder}"))
    source = FleetSource.read(file)
    with pytest.raises(StoreNotInitialisedError, match="there is no folder"):
        source.open_store()
    first, _ = ensure_identity(LocalStore(folder), source.fleet)
    assert source.open_store().url == f"file://{folder}"
    folder.rename(tmp_path / "unmounted")
    with pytest.raises(StoreGoneError, match="nothing is there now"):
        source.open_store()
    second, _ = ensure_identity(LocalStore(folder), source.fleet)
    assert first.fleet_id != second.fleet_id
    with pytest.raises(StoreGoneError, match=f"a store of fleet {second.fleet_id} is there now"):
        source.open_store()
    folder.rename(tmp_path / "other")
    (tmp_path / "unmounted").rename(folder)
    source.open_store()
    # Nothing has to be mounted if the snapshots are there.
    LocalStore(folder).create("snapshots/daily/snapshot.json", b"{}")
    (folder / "fleet.json").rename(tmp_path / "lost.json")
    with pytest.raises(IdentityLostError):
        source.open_store()
    (tmp_path / "lost.json").rename(folder / "fleet.json")
    source.open_store()


def test_an_assertion_that_no_drill_could_ask_is_refused(file: Path) -> None:
    write(file, f'{RULES}[[drill.assertion]]\nnode = "s9"\nsql = "SELECT 1"\nexpected = 1\n')
    with pytest.raises(FleetFileError, match=r"drill\.assertion 1: node names s9, which is not a primary"):
        FleetSource.read(file)
