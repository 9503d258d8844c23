"""`status --watch` as a process: on a terminal that can't move its cursor, and in a pipe."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from cutline.fleet.config import Fleet
from cutline.snapshots.records.store_identity import ensure_identity
from tests.commands.snapshot_runs import command_line
from tests.unit.made_fleets import unreachable_fleet

SECONDS_MAX = 60
NOTHING = b"no operations are under way"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A fleet with an empty store; its node is not reachable."""
    fleet = unreachable_fleet(tmp_path)
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def read_until(descriptor: int, text: bytes) -> bytes:
    """Read until `text` has come; return what was read."""
    shown, deadline = b"", time.monotonic() + SECONDS_MAX
    while text not in shown:
        ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"nothing more was shown after {shown!r}"
        shown += os.read(descriptor, 1000)
    return shown


@pytest.mark.parametrize("kind", ["dumb", "xterm"])
def test_every_terminal_shows_the_operations(fleet: Fleet, kind: str) -> None:
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        command_line(fleet, "status", "--watch"), stdin=other_end, stdout=other_end, stderr=other_end,
        env=os.environ | {"TERM": kind},
    )  # fmt: skip
    try:
        os.close(other_end)
        shown = read_until(terminal, NOTHING)
        assert (b"\x1b" in shown) == (kind != "dumb")
    finally:
        process.terminate()
        process.wait(SECONDS_MAX)
        os.close(terminal)


def test_a_pipe_gets_each_state_at_once_and_its_end_ends_the_command(fleet: Fleet) -> None:
    with subprocess.Popen(command_line(fleet, "status", "--watch"), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            read_until(process.stdout.fileno(), NOTHING)
            process.stdout.close()
            assert process.wait(SECONDS_MAX) == 0
        finally:
            process.kill()
