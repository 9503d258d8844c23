"""Commands with few open files: each ends well or names the limit, and what they leave hinders no later one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.commands.snapshot_runs import Ready, Runs, command_line, configure_fleet, dropping_slots

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.fleet.config import Fleet

SECONDS_MAX = 60
LIMITS = (20, 36, 52)
BY_SPARK = "from tests.run.by_spark import work_by_spark; work_by_spark(); "


def run_limited(fleet: Fleet, limit: str, *words: str, before: str = "") -> tuple[int, dict[str, object]]:
    """Run a command under `ulimit` with these options, after the program `before`."""
    python, option, program, *rest = command_line(fleet, *words)
    line = shlex.join([python, option, f"{before}{program}", *rest, "--json"])
    command = f"ulimit {limit} && exec {line}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS_MAX, env=os.environ, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Runs:
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    return Runs(fleet, Ready(spark))


def test_a_command_that_can_open_no_more_files_names_the_limit_and_the_next_one_continues(runs: Runs) -> None:
    with dropping_slots(runs.fleet):
        runs.init()
        runs.full("few")
        number = 0
        for limit in LIMITS:
            for words in (("create", "few", "--incremental"), ("init",)):
                code, found = run_limited(runs.fleet, f"-n {limit}", *words)
                if code != 0:
                    assert (code, found["error"]) == (6, "open-files"), found
                    assert str(found["message"]).startswith(f"the limit of {limit} open files and connections")
                elif words[0] == "create":
                    number += 1
                    assert found["increment"] == number
        # The soft limit is raised.
        code, found = run_limited(runs.fleet, "-Sn 24", "create", "few", "--incremental")
        assert (code, found.get("increment")) == (0, number + 1), found


def test_a_jvm_that_can_open_no_more_files_names_the_limit(runs: Runs) -> None:
    with dropping_slots(runs.fleet):
        runs.init()
        code, found = run_limited(runs.fleet, "-n 256", "create", "few", before=BY_SPARK)
        assert (code, found["error"]) == (6, "open-files"), found
        assert found["message"] == (
            "the limit of 256 open files and connections (ulimit -n) has been reached: spark did not start:"
            " too many open files"
        )
