"""What a user of PostgreSQL 15 sees, whose standbys can't decode WAL: the README's tour, and the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.shown_commands import Shell, commands_of, pages, shell_in
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLDEST = min(MAJORS)
INCONCLUSIVE = 4
STORY_SECONDS_MAX = 300
LEFT_OUT = "standbys older than PostgreSQL 16 can't decode WAL and are left out: s1-b1, s2-b1, s3-b1"


def run_demo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from cutline.cli.main import main; main()", "--json", "demo", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=STORY_SECONDS_MAX)


def test_the_readmes_tour_runs(spark: SparkSession, tmp_path: Path) -> None:
    programs = require_server(OLDEST).programs
    changes = {"demo up try": f"demo up try --postgresql {programs}", r"--seconds \d+": "--seconds 10"}
    commands = commands_of(pages()[0])
    tour = commands[: next(number for number, one in enumerate(commands) if "demo down" in one.line) + 1]
    with shell_in(tmp_path, spark, Shell(changes, {"snapshot check nightly": INCONCLUSIVE})) as shell:
        for command in tour:
            shell.run_shown(command)
    outputs = {one.line: shell.outputs[one] for one in tour}
    assert LEFT_OUT in outputs["snapshot init"].splitlines()
    assert "the bank's books balance" in outputs["wait"]
    assert outputs["snapshot check nightly"].splitlines()[-1].startswith("inconclusive, ")
    assert "conflict" not in outputs["snapshot check nightly"]
    restored = outputs["snapshot restore nightly --increment 1 --replace --yes"]
    assert "nightly at increment 1" in restored


@pytest.mark.timeout(STORY_SECONDS_MAX + 60)
def test_the_demos_story_holds_and_says_that_its_check_is_inconclusive() -> None:
    done = run_demo("--postgresql", str(require_server(OLDEST).programs))
    document = json.loads(done.stdout)
    assert (done.returncode, document["check"]["result"]) == (INCONCLUSIVE, "inconclusive"), done.stderr
    assert (document["holds"], document["invariants"]["hold"]) == (False, True)
    assert [one["conflicts"] for one in document["check"]["snapshots"]] == [[]]
    assert [cut["increment"] for cut in document["cuts"]] == [0, 1, 2, 3]


def test_a_folder_without_a_servers_programs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "postgres").write_text("")
    (tmp_path / "postgres").chmod(0o755)
    done = run_demo("up", str(tmp_path / "fleet"), "--postgresql", str(tmp_path))
    assert (done.returncode, f"{tmp_path} lacks PostgreSQL's programs initdb, pg_ctl" in done.stdout) == (2, True), done
    assert not (tmp_path / "fleet").exists()
