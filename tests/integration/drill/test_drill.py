"""A drill restores into servers of its own and asks them; no node of the fleet is contacted, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import UNSET, structs

import cutline.restore.drill.drill
import cutline.restore.targets.requirements
from cutline.embedded.fleet import open_fleet
from cutline.fleet.config import AssertionTable, Node, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.baseline import NodeIdentity
from cutline.restore.drill.drill import run_drill, settle_dead_drills
from cutline.restore.drill.servers import DrillUnfitError
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.operations.ended_operations import read_history
from cutline.snapshots.operations.open_operations import read_open_intents, read_open_operations
from cutline.snapshots.records.chain import Chain
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready, run_command
from tests.integration.drill.drilled import FAILING, HOLDING, NAME, Drilled, processes_of, servers_below, write_fleet

ROOT, SECONDS_MAX = Path(__file__).parents[3], 120


def test_a_drill_restores_asks_and_leaves_nothing(
    drilled: Drilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    junit = tmp_path / "drill.xml"
    code, document = run_here(fleet, "drill", NAME, "--junit", str(junit), spark=drilled.spark)
    assert [(one["node"], one["holds"], one["why"]) for one in document["assertions"]] == [
        (node, True, "") for node in ("s1", "s1", "s2", "s2", "s2")
    ]
    assert (code, document["schema"], document["result"]) == (0, "cutline/drill/1", "holds")
    assert (document["increment"], document["assertions"][1]["found"]) == (1, [["2.50", "t", "a"]])
    assert [one["rows"] for one in document["nodes"]] == drilled.rows
    assert [(one["shard"], one["rows"]) for one in document["plan"]["targets"]] == [
        *zip(("s1", "s2"), drilled.rows, strict=True)
    ]
    assert min(document["seconds"], document["assertions"][0]["seconds"]) > 0
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "0", "0")
    assert drilled.connections == []
    assert read_open_intents(fleet.store.open()) == []
    assert list(tmp_path.glob("*session*")) == []


def test_what_does_not_hold_is_named_and_a_shard_that_is_lacking_is_skipped(drilled: Drilled, tmp_path: Path) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, FAILING))
    extra = AssertionTable("s9", "SELECT 1", 1)
    drill = structs.replace(fleet.drill, assertion=(*fleet.drill.assertion, extra))
    # A primary that was added after the snapshot.
    fleet = replace(fleet, nodes=(*fleet.nodes, Node("s9", "host=/nowhere")), drill=drill)
    report = run_drill(fleet, RestoreRequest(NAME, 1), Ready(drilled.spark), Silent())
    assert report.result == "fails"
    # Who waits for the operation, or looks it up, learns what the assertions found.
    (ended, *_) = read_history(fleet.store.open(), 1, NAME)
    assert (ended.kind, ended.code, ended.volumes["rows"]) == ("drill", 1, sum(drilled.rows))
    # As long as it loaded; other restores are not estimated by a drill.
    assert 0 < sum(ended.phases.values()) < report.seconds
    assert ended.outcome is not None
    assert ended.outcome.figures is UNSET
    whys = [one.why for one in report.assertions]
    assert whys[:2] == ["expected 1.5, found 2.50", 'expected "NULL", found NULL']
    assert 'column "nothing" does not exist' in whys[2]
    assert "in a read-only transaction" in whys[3]
    assert "cannot insert multiple commands" in whys[4]
    assert whys[5] == "the snapshot has no shard s9"
    assert [one.holds for one in report.assertions] == [False] * 5 + [None]


def drill_process(drilled: Drilled, folder: Path, signal_name: str) -> subprocess.CompletedProcess[str]:
    """Run a drill that gets the signal when its servers run and its restore has begun."""
    path = write_fleet(drilled, folder, HOLDING)
    program = [
        sys.executable,
        "-m",
        "tests.faults.signalled_command",
        signal_name,
        RestoreCrashPoint.INTENT_STORED,
        "1",
    ]
    return subprocess.run(
        [*program, "--", "--fleet", str(path), "drill", NAME],
        capture_output=True, text=True, timeout=SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip


def test_ctrl_c_removes_the_servers(drilled: Drilled, tmp_path: Path) -> None:
    done = drill_process(drilled, tmp_path, "SIGINT")
    assert done.returncode == 130, done.stderr
    assert list(tmp_path.glob("*session*")) == []
    assert processes_of(tmp_path) == []
    assert read_open_intents(load_fleet(tmp_path / "fleet.toml").store.open()) == []


def test_the_servers_of_a_killed_drill_are_removed_by_the_next_command(
    drilled: Drilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = drill_process(drilled, tmp_path, "SIGKILL")
    assert done.returncode == -9, done.stderr
    (state,) = servers_below(tmp_path)
    servers = open_fleet(state.parent)
    assert len(servers.running()) == 2
    assert processes_of(tmp_path)
    fleet, store = load_fleet(tmp_path / "fleet.toml"), load_fleet(tmp_path / "fleet.toml").store.open()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, document = run_command(fleet, "show", NAME)
    assert code == 0, document
    assert servers.running() == ()
    assert processes_of(tmp_path) == []
    assert servers_below(tmp_path) == []
    # What it has recorded in the store, the next drill on its machine settles. Others wait: a clock may be wrong.
    (left,) = read_open_intents(store)
    assert "the next drill on its machine settles it" in read_open_operations(store)[0].text
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(cutline.restore.drill.drill, "is_gone", lambda _: False)
        settle_dead_drills(store, datetime.now(UTC) + timedelta(hours=1))
        assert [one.operation for one in read_open_intents(store)] == [left.operation]
    settle_dead_drills(store, datetime.now(UTC))
    assert read_open_intents(store) == []


def test_servers_that_lack_an_extension_or_are_older_are_refused(
    drilled: Drilled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, HOLDING))
    monkeypatch.setattr(cutline.restore.targets.requirements, "EXTENSION", "VIEW")
    with pytest.raises(DrillUnfitError, match="node s1 lacks extensions that the snapshot has: who") as raised:
        run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent())
    assert raised.value.hint.splitlines() == [
        "name the programs of a PostgreSQL installation that has them: [drill] postgresql in fleet.toml",
        "or restore without them: --allow-refused-ddl",
        f"or drill on servers of your own: snapshot drill {NAME} --to FILE",
    ]
    # As pg_cron is: whatever fleet.toml allows, and wherever the servers are, it can't be created.
    with monkeypatch.context() as patch:
        patch.setattr(cutline.restore.targets.requirements, "OF_ONE_DATABASE", {"who"})
        with pytest.raises(DrillUnfitError, match="in only one database: who") as raised:
            run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent())
        assert raised.value.hint == "drill without them: --allow-refused-ddl"
    baseline = Chain.baseline.fget

    def newer(chain: Chain) -> dict[str, NodeIdentity]:
        return {node: structs.replace(one, server_version=990000) for node, one in baseline(chain).items()}

    monkeypatch.setattr(Chain, "baseline", property(newer))
    with pytest.raises(DrillUnfitError, match="is older than the snapshot's 99") as raised:
        run_drill(fleet, RestoreRequest(NAME), Ready(drilled.spark), Silent())
    assert raised.value.hint.splitlines()[-1] == (f"or drill on servers of your own: snapshot drill {NAME} --to FILE")
    assert read_open_intents(fleet.store.open()) == []


def test_a_drill_on_temporary_servers_takes_no_options_of_a_target(drilled: Drilled, tmp_path: Path) -> None:
    fleet = load_fleet(write_fleet(drilled, tmp_path, ""))
    for option in ("--replace", "--dry-run", "--create-roles", "--no-owner"):
        code, out = run_and_capture(fleet, "drill", NAME, option, "--json")
        assert code == 2, out
