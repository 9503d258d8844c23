"""What another user put into the cache is never run: not the folder, not a class archive in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cutline.spark.class_archive as class_archive
from cutline.fleet.own_files import cache_folder
from cutline.spark.class_archive import archive_options, is_recording
from cutline.spark.java import Java
from tests.other_user import OTHER_UID, needs_root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def java(tmp_path: Path) -> tuple[Java, Path]:
    home, spark_home = tmp_path / "java", tmp_path / "spark"
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").touch()
    (spark_home / "jars").mkdir(parents=True)
    return Java(home, home, "17.0.1"), spark_home


def test_the_folder_is_made_private(root: Path) -> None:
    folder = cache_folder()
    assert folder == root / "cutline"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_not_used(root: Path, mode: int) -> None:
    (root / "cutline").mkdir(parents=True)
    (root / "cutline").chmod(mode)
    assert cache_folder() is None


def test_a_folder_that_others_can_replace_is_not_used(root: Path) -> None:
    assert cache_folder() is not None
    root.chmod(0o777)
    assert cache_folder() is None
    root.chmod(0o1777)
    assert cache_folder() is not None


def test_a_link_in_its_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root.mkdir()
    (root / "cutline").symlink_to(elsewhere)
    assert cache_folder() is None


@needs_root
def test_a_folder_of_another_user_is_not_used(root: Path) -> None:
    (root / "cutline").mkdir(parents=True, mode=0o700)
    os.chown(root / "cutline", OTHER_UID, OTHER_UID)
    assert cache_folder() is None


@pytest.mark.parametrize("planted", ["owner", "mode", "link"])
def test_an_archive_that_another_user_planted_is_deleted_and_not_loaded(
    root: Path, java: tuple[Java, Path], tmp_path: Path, planted: str
) -> None:
    if planted == "owner" and os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    assert root
    archive = archive_of(java)
    make_archive(archive, 1.0)
    assert archive_options(*java, "4.3.0") == [f"-XX:SharedArchiveFile={archive}"]
    if planted == "owner":
        os.chown(archive, OTHER_UID, OTHER_UID)
    elif planted == "mode":
        archive.chmod(0o666)
    else:
        archive.rename(tmp_path / "theirs")
        archive.symlink_to(tmp_path / "theirs")
    assert is_recording(archive_options(*java, "4.3.0"))
    assert not os.path.lexists(archive)


def test_another_archive_deletes_the_oldest_with_its_base(root: Path, java: tuple[Java, Path]) -> None:
    """A base is the archive of Java's own classes, made where the runtime lacks one; it goes with the one it is for."""
    new = archive_of(java)
    folder = root / "cutline"
    for number, key in enumerate(("aaaa", "bbbb", "cccc")):
        make_archive(folder / f"spark-4.0.0-java-17-{key}.jsa", number)
        make_archive(folder / f"java-17-{key}.jsa", 100 - number)
    make_archive(folder / "java-17-left.jsa", 200)
    (folder / "versitygw").touch()
    assert archive_options(*java, "4.3.0") == [f"-XX:ArchiveClassesAtExit={new}"]
    kept = class_archive.ARCHIVES_KEPT - 1
    assert kept == 2
    assert {path.name for path in folder.iterdir()} == {
        "spark-4.0.0-java-17-bbbb.jsa",
        "java-17-bbbb.jsa",
        "spark-4.0.0-java-17-cccc.jsa",
        "java-17-cccc.jsa",
        "versitygw",
    }


def archive_of(java: tuple[Java, Path]) -> Path:
    (option,) = archive_options(*java, "4.3.0")
    assert is_recording([option])
    return Path(option.partition("=")[2])


def make_archive(path: Path, modified: float) -> None:
    """Write a file that looks like a whole archive."""
    path.write_bytes(b"\xa8\x0b\x0b\xf0")
    os.truncate(path, class_archive.ARCHIVE_BYTES_MIN)
    os.utime(path, (modified, modified))
