from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs.cached import NotInstallableError, require_program
from tests.programs.npm_program import NpmProgram

PROGRAM = NpmProgram("served", "1.2.3", "served-blob")
NPM = """#!/bin/sh
echo "$@" >> "{calls}"
while [ "$1" != --prefix ]; do shift; done
{then}
"""
INSTALLS = 'mkdir -p "$2/node_modules/.bin" && echo installed > "$2/node_modules/.bin/served-blob"'


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an `npm` that logs its calls in the returned file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_npm(tmp_path, INSTALLS)
    return tmp_path / "calls"


def write_npm(folder: Path, then: str) -> None:
    (folder / "npm").write_text(NPM.format(calls=folder / "calls", then=then))
    (folder / "npm").chmod(0o755)


def test_a_package_is_installed_once_whole_and_in_its_version(calls: Path) -> None:
    write_npm(calls.parent, f"{INSTALLS}; echo 'npm error ENOTFOUND registry' >&2; exit 1")
    with pytest.raises(NotInstallableError, match="can't be downloaded"):
        PROGRAM.install()
    assert not PROGRAM.path().exists()
    write_npm(calls.parent, INSTALLS)
    assert PROGRAM.install() == PROGRAM.install() == PROGRAM.path()
    assert PROGRAM.path().read_text() == "installed\n"
    assert [call.split()[-1] for call in calls.read_text().splitlines()] == ["served@1.2.3"] * 2


def test_without_npm_the_reason_says_so(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(calls.parent / "nothing"))
    with pytest.raises(NotInstallableError, match="no npm"):
        PROGRAM.install()


def test_a_program_is_taken_from_the_cache_or_the_path_or_its_test_is_skipped(calls: Path) -> None:
    with pytest.raises(
        pytest.skip.Exception, match="lacks served-blob: it is neither in the cache folder nor on the PATH"
    ):
        require_program("served-blob", PROGRAM.path())
    on_path = calls.parent / "served-blob"
    on_path.write_text("")
    on_path.chmod(0o755)
    assert require_program("served-blob", PROGRAM.path()) == on_path
    PROGRAM.install()
    assert require_program("served-blob", PROGRAM.path()) == PROGRAM.path()
