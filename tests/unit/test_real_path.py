"""Where a path leads: a circle of links is named, and what can't be looked at is left to those who open it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.fleet.own_process import real_path
from cutline.storage.errors import UsageError


def test_links_are_followed_and_a_circle_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "round").symlink_to("round")
    assert real_path(tmp_path / "link/new") == tmp_path.resolve() / "folder/new"
    for path in ("round", "round/new"):
        with pytest.raises(UsageError, match="form a loop"):
            real_path(tmp_path / path)
    with pytest.raises(UsageError, match="null byte"):
        real_path(Path("a\0b"))


def test_a_path_in_a_folder_that_this_user_may_not_enter_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    assert real_path(Path("/of/another/user")) == Path("/of/another/user")
