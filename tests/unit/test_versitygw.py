from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.versitygw
from tests.versitygw import NoGoError, build, built

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 60
GO = """#!/bin/sh
echo "$@" >> "{calls}"
sleep 0.5
{then}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a `go` that takes its time and notes how it was called."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    write_go(tmp_path, 'echo built > "$GOBIN/versitygw"')
    return tmp_path / "calls"


def write_go(folder: Path, then: str) -> None:
    (folder / "go").write_text(GO.format(calls=folder / "calls", then=then))
    (folder / "go").chmod(0o755)


def test_two_who_build_at_once_build_it_once(calls: Path) -> None:
    command = [sys.executable, "-m", "tests.versitygw"]
    building = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [process.wait(SECONDS_MAX) for process in building] == [0, 0]
    (call,) = calls.read_text().splitlines()
    assert call.endswith(f"versitygw@{tests.versitygw.VERSION}")
    assert build() == built()
    assert built().read_text() == "built\n"
    assert len(calls.read_text().splitlines()) == 1
    assert {path.name for path in built().parent.iterdir()} == {built().name, f"{built().name}.lock"}


def test_a_build_that_fails_is_an_error_and_no_network_a_reason_to_skip(calls: Path) -> None:
    write_go(calls.parent, "echo 'main.go:1: syntax error' >&2; exit 1")
    with pytest.raises(AssertionError, match="syntax error"):
        build()
    write_go(calls.parent, "echo 'dial tcp: lookup proxy.golang.org: no such host' >&2; exit 1")
    with pytest.raises(NoGoError, match="can't download"):
        build()
    assert not built().exists()


def test_without_go_the_reason_says_so(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(calls.parent / "nothing"))
    with pytest.raises(NoGoError, match="no Go toolchain"):
        build()
