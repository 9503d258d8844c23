from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.cached import NotInstallableError
from tests.s3.versitygw import PROGRAM, build, program_path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 60
GO = """#!/bin/sh
echo "$@" >> "{calls}"
sleep 0.5
{then}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a slow `go` that logs its calls in the returned file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_go(tmp_path, 'echo built > "$GOBIN/versitygw"')
    return tmp_path / "calls"


def write_go(folder: Path, then: str) -> None:
    (folder / "go").write_text(GO.format(calls=folder / "calls", then=then))
    (folder / "go").chmod(0o755)


def test_two_concurrent_builds_build_once(calls: Path) -> None:
    command = [sys.executable, "-m", "tests.s3.versitygw"]
    building = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(SECONDS_MAX) for process in building] == [0, 0]
    (call,) = calls.read_text().splitlines()
    assert call.endswith(f"versitygw@{PROGRAM.version}")
    assert build() == program_path()
    assert program_path().read_text() == "built\n"
    assert len(calls.read_text().splitlines()) == 1
    assert {path.name for path in program_path().parent.iterdir()} == {
        program_path().name,
        f"{program_path().name}.lock",
    }


def test_a_failed_build_is_an_error_and_a_missing_network_a_reason_to_skip(calls: Path) -> None:
    write_go(calls.parent, "echo 'main.go:1: syntax error' >&2; exit 1")
    with pytest.raises(AssertionError, match="syntax error"):
        build()
    write_go(calls.parent, "echo 'dial tcp: lookup proxy.golang.org: no such host' >&2; exit 1")
    with pytest.raises(NotInstallableError, match="can't be downloaded"):
        build()
    assert not program_path().exists()


def test_without_go_the_reason_says_so(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(calls.parent / "nothing"))
    with pytest.raises(NotInstallableError, match="no Go toolchain"):
        build()
