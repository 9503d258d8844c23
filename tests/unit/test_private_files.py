"""What of the system's folders is not for everybody, and so not for a confined server of an ordinary user."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.embedded import needed_files
from cutline.embedded.needed_files import find_private


def make(path: Path, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    path.chmod(mode)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    for name, mode in (("bin/cat", 0o755), ("bin/admins", 0o750), ("etc/key", 0o600), ("etc/of_group", 0o640)):
        make(tmp_path / name, mode)
    for name, mode in (("data", 0o700), ("shared_data", 0o750), ("passed_through", 0o711)):
        make(tmp_path / name / "file", 0o644)
        (tmp_path / name).chmod(mode)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    return tmp_path


def private(system: Path) -> list[str]:
    return sorted(str(one.relative_to(system)) for one in find_private([str(system)]))


def test_what_others_may_not_read_is_private(system: Path) -> None:
    assert private(system) == ["bin/admins", "data", "etc/key", "etc/of_group", "passed_through", "shared_data"]
    assert find_private([str(system / "link"), str(system / "lacking"), str(system / "bin/cat")]) == []


def test_a_home_folder_is_private_as_a_whole_whatever_its_mode_and_by_whatever_link(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(system / "etc/home/open", 0o644)
    make(system / "etc/home/.pgpass", 0o600)
    (system / "home").symlink_to("etc/home")
    assert "etc/home/.pgpass" in private(system)
    monkeypatch.setenv("HOME", str(system / "home"))
    assert [one for one in private(system) if "home" in one] == ["etc/home"]


def test_of_very_many_files_the_folder_is_private(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed_files, "MANY", 1)
    make(system / "etc/below/key", 0o600)
    assert private(system / "etc") == ["."]
