"""Files that are replaced whole or not at all: pages of reports, and metrics."""

from __future__ import annotations

import os
import resource
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from cutline.cli.output.metrics_file import replace_metrics
from cutline.embedded.fleet import open_fleet
from cutline.embedded.folder import check_directory, refuse_foreign_folder
from cutline.fleet.own_files import replaced_file
from cutline.nodes.programs import check_programs_folder
from cutline.storage.errors import UsageError


def test_a_file_takes_its_place_at_the_end_and_keeps_its_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "report.html", tmp_path / "link"
    link.symlink_to(file)
    with replaced_file(link) as write:
        write("first")
        assert not file.exists()
    mask = os.umask(0)
    os.umask(mask)
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("first", 0o666 & ~mask)
    assert link.is_symlink()
    file.chmod(0o640)
    before = file.open()
    with replaced_file(file) as write:
        write("second")
        assert file.read_text() == "first"
    # Who had it open reads on in the old one.
    assert (before.read(), file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("first", "second", 0o640)
    before.close()
    with suppress(ZeroDivisionError), replaced_file(file) as write:
        write("third")
        raise ZeroDivisionError
    assert file.read_text() == "second"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "report.html"]


@pytest.mark.parametrize("size", [2_000, 1_000_000])
def test_what_cannot_be_written_to_its_end_leaves_nothing(tmp_path: Path, size: int) -> None:
    """As on a full disk, the file system takes only a part: here because of the process's limit.

    Of one size a buffer still holds all when the file is closed.
    """
    file = tmp_path / "report.html"
    file.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UsageError, match=f"{file}: File too large"), replaced_file(file) as write:
            write("x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_metrics_are_replaced_at_once_and_readable_by_all(tmp_path: Path) -> None:
    file = tmp_path / "cutline.prom"
    file.write_text("old")
    file.chmod(0o600)
    with file.open() as before:
        old_mask = os.umask(0o077)
        try:
            replace_metrics(file, b"new\n")
        finally:
            os.umask(old_mask)
        assert before.read() == "old"
    assert file.read_bytes() == b"new\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["cutline.prom"]


def test_what_is_written_first_is_not_read_as_metrics(tmp_path: Path) -> None:
    with replaced_file(tmp_path / "cutline.prom"):
        (first,) = tmp_path.iterdir()
        assert first.name.startswith(".")
        assert first.suffix != ".prom"


def test_metrics_that_cannot_be_replaced_stay_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place, why in (("folder", "it is not a regular file"), ("missing/cutline.prom", "No such file or directory")):
        with pytest.raises(UsageError, match=f"{tmp_path / place}: {why}"):
            replace_metrics(tmp_path / place, b"new\n")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_a_link_that_another_user_has_made_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = tmp_path / "ours", tmp_path / "metrics"
    file.write_text("kept")
    link.symlink_to(file)
    monkeypatch.setattr(os, "geteuid", lambda: 4712)
    if not os.getuid():
        # Links of root's are followed.
        os.chown(link, 4711, -1, follow_symlinks=False)
    with pytest.raises(UsageError, match="another user's symbolic link"), replaced_file(link) as write:
        write("lost")
    assert file.read_text() == "kept"


def test_links_that_lead_in_a_circle_are_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path in (loop, loop / "report.html"):
        said = f"{path}: (symbolic links form a loop at {loop}|Too many levels of)"
        with pytest.raises(UsageError, match=said), replaced_file(path):
            pass
    for use in (check_programs_folder, check_directory, open_fleet, refuse_foreign_folder):
        with pytest.raises(UsageError, match="form a loop"):
            use(loop)
        with pytest.raises(UsageError, match="null"):
            use(Path("a\0b"))
