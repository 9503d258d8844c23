"""Where others can replace files, a command's temporary files are in another folder, or it refuses to run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import cutline.spark.session_folder as session_folder_module
from cutline.spark.session_folder import NoTemporaryFolderError, lasting_folder, session_folder
from tests.other_user import OTHER_UID, needs_root

REPLACEABLE = ["itself", "above", "behind a link"]


def make_replaceable(temporary: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> Path:
    """Let TMPDIR name a folder in which, or above which, every user can replace files; return it."""
    mine = temporary / "open" / "mine"
    mine.mkdir(parents=True, mode=0o700)
    (temporary / "link").symlink_to(mine)
    (mine if how == "itself" else mine.parent).chmod(0o777)
    named = temporary / "link" if how == "behind a link" else mine
    monkeypatch.setenv("TMPDIR", str(named))
    monkeypatch.setattr(tempfile, "tempdir", str(named))
    return named


@pytest.mark.parametrize("how", REPLACEABLE)
def test_where_everybody_can_replace_files_the_session_is_elsewhere(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    make_replaceable(temporary, monkeypatch, how)
    with session_folder() as folder:
        assert folder.parent == Path("/var/tmp").resolve()
        assert (os.environ["TMPDIR"], tempfile.gettempdir()) == (str(folder), str(folder))
        assert Path(lasting_folder()) == folder.parent
    assert not folder.exists()
    assert "warning: other users of the machine can replace files" in capsys.readouterr().err


def test_a_sticky_folder_for_all_is_used(temporary: Path) -> None:
    temporary.chmod(0o1777)
    with session_folder() as folder:
        assert folder.parent == temporary


@needs_root
def test_a_folder_that_another_user_owns_is_not_used(temporary: Path) -> None:
    os.chown(temporary, OTHER_UID, OTHER_UID)
    with session_folder() as folder:
        assert folder.parent != temporary
    os.chown(temporary, 0, 0)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "XDG_RUNTIME_DIR"])
def test_folders_of_the_user_are_tried(temporary: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    make_replaceable(temporary, monkeypatch, "itself")
    for name in ("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv(variable, str(temporary / "own"))
    (temporary / "own").mkdir(mode=0o700)
    candidates = list(session_folder_module._other_parents())
    monkeypatch.setattr(session_folder_module, "_other_parents", lambda: iter(candidates[1:]))
    with session_folder() as folder:
        assert folder.is_relative_to(temporary / "own")


@pytest.mark.parametrize("how", REPLACEABLE)
def test_where_no_folder_is_safe_a_command_refuses_to_run(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    named = make_replaceable(temporary, monkeypatch, how)
    monkeypatch.setattr(session_folder_module, "_other_parents", lambda: iter([named, temporary / "absent"]))
    with pytest.raises(NoTemporaryFolderError, match="other users of the machine") as refused, session_folder():
        pass
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_that_spark_would_take_for_two_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, *, is_linked: bool
) -> None:
    """The second would be below the working directory. A link does not help: Spark gets the path that it leads to."""
    (named := temporary / "one, two").mkdir()
    if is_linked:
        (temporary / "link").symlink_to(named)
        named = temporary / "link"
    monkeypatch.setattr(tempfile, "tempdir", str(named))
    with pytest.raises(NoTemporaryFolderError, match=r"one, two, the folder for .* contains a comma"), session_folder():
        pass


def test_a_folder_of_the_user_that_spark_would_take_for_two_is_not_tried(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_replaceable(temporary, monkeypatch, "itself")
    others = [temporary / name for name in ("a,b", "c")]
    for other in others:
        other.mkdir(mode=0o700)
    monkeypatch.setattr(session_folder_module, "_other_parents", lambda: iter(others))
    with session_folder() as folder:
        assert folder.parent == others[1]
