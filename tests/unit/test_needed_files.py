"""Which files a confined server of a build sees: nothing that only lies beside the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.embedded import needed_files as module
from cutline.embedded.needed_files import needed_files
from cutline.nodes.programs import Programs


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that is a build's, too; the programs are not asked."""
    monkeypatch.setattr(module, "SYSTEM", ("/usr",))
    monkeypatch.setattr(module, "_shared_files", lambda _: [])
    monkeypatch.setattr(module, "_libraries", lambda *_: [])
    for name in ("bin/pg_ctl", "bin/postgres", "bin/of_the_user", "lib/plpgsql.so", "library/diary", "share/of_all"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def shown(home: Path) -> list[str]:
    return [str(path.relative_to(home)) for path in needed_files(Programs(home / "bin"))]


def test_what_lies_beside_a_build_is_not_shown(home: Path) -> None:
    assert shown(home) == ["bin/pg_ctl", "bin/postgres", "lib", "share"]


def test_links_are_shown_with_what_they_lead_to(home: Path) -> None:
    (home / "lib64").symlink_to("lib")
    (home / "elsewhere").mkdir()
    (home / "share/linked").symlink_to(home / "elsewhere")
    (home / "share/lost").symlink_to("nowhere")
    assert shown(home) == ["bin/pg_ctl", "bin/postgres", "elsewhere", "lib", "lib64", "share"]


def test_what_is_in_a_folder_that_is_found_later_is_shown_with_it(home: Path) -> None:
    """In a folder that is shown, and can't be changed, nothing else can be shown."""
    (home / "share/programs").symlink_to("../bin")
    assert shown(home) == ["bin", "lib", "share"]


def test_of_a_build_in_a_home_folder_of_the_system_what_is_needed_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SYSTEM", (str(home.parent),))
    programs = Programs(home / "bin")
    assert needed_files(programs) == []
    assert [str(one.relative_to(home)) for one in needed_files(programs, [home])] == [
        "bin/pg_ctl", "bin/postgres", "lib", "share",
    ]  # fmt: skip
    assert needed_files(programs, [home / "bin/of_the_user", home / "lib"]) == [home / "lib"]
