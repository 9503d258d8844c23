"""What `watch` makes of the end of a command that it has run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cutline.cli.watch.running_command
from cutline.check.report import CheckReport, Compared, Skipped, SnapshotReport
from cutline.cli.output.failure import REFUSED, failure_of
from cutline.cli.output.left_out import left_out_lines
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.running_command import CommandResult, RunningCommand, run_command, start_command, stop_commands
from cutline.cli.watch.tasks import CommandFailedError, SnapshotReadError, prune, take_full, verdict_of
from cutline.fleet.config import WatchTable
from cutline.fleet.record import to_builtins
from cutline.fleet.units import Interval
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.storage.errors import BusyError
from tests.unit.made_fleets import new_fleet

ERROR = {"error": "node-unreachable", "message": "node s1 is away", "hint": "snapshot --fleet /tmp/copy init"}


def test_a_verdict_is_no_failure_whatever_it_is() -> None:
    assert verdict_of("check of a", CommandResult(0, {"result": "valid"}), new_fleet()).finding is None
    for code, result in ((1, "conflicts"), (4, "inconclusive")):
        finding = verdict_of("check of a", CommandResult(code, {"result": result}), new_fleet()).finding
        assert finding is not None
        assert (finding.code, finding.slug, finding.message) == (code, result, f"check of a: {result}")


@pytest.mark.parametrize("copy", ["/tmp/copy", "/tmp/a b/fleet.toml", "/tmp/it's here/fleet.toml"])
def test_a_command_without_a_verdict_has_failed_and_its_hint_names_no_copy_of_the_file(copy: str) -> None:
    document = ERROR | {"hint": f"snapshot --fleet {shlex.quote(copy)} init"}
    with pytest.raises(CommandFailedError) as raised:
        verdict_of("check of a", CommandResult(6, dict(document)), new_fleet())
    assert (raised.value.exit_code, raised.value.message) == (6, ERROR["message"])
    assert raised.value.hint == "snapshot init"


def test_the_failure_of_a_command_has_the_slug_that_the_command_said() -> None:
    for document, slug in ((ERROR, "node-unreachable"), ({}, "command-failed")):
        with pytest.raises(CommandFailedError) as raised:
            verdict_of("check of a", CommandResult(6, dict(document)), new_fleet())
        assert failure_of(raised.value).slug == slug


def test_a_command_that_was_in_anothers_way_has_not_failed() -> None:
    with pytest.raises(BusyError, match="node s1 is away"):
        verdict_of("check of a", CommandResult(7, dict(ERROR)), new_fleet())


def test_a_command_that_died_is_named_by_its_signal() -> None:
    with pytest.raises(CommandFailedError, match="ended by signal 11"):
        verdict_of("check of a", CommandResult(-11, {}), new_fleet())


def test_the_document_and_the_code_of_a_real_command(tmp_path: Path) -> None:
    missing = tmp_path / "fleet.toml"
    ended = run_command(missing, ["list"])
    assert (ended.code, ended.text) == (2, f"no fleet file at {missing}")


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", deaf))
    monkeypatch.setattr(cutline.cli.watch.running_command, "CLEAN_UP_SECONDS_MAX", 0.5)
    running = start_command(tmp_path, [])
    # It says so once it is deaf.
    while not os.fstat(running.output.fileno()).st_size:
        time.sleep(0.01)
    running.stop()
    ended = running.result()
    assert ended is not None
    assert ended.code == -9


def test_several_commands_that_do_not_end_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of a watch gives it two minutes, however many commands it runs."""
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
    )
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", deaf))
    monkeypatch.setattr(cutline.cli.watch.running_command, "CLEAN_UP_SECONDS_MAX", 2.0)
    running = [start_command(tmp_path, []) for _ in range(3)]
    while not all(os.fstat(one.output.fileno()).st_size for one in running):
        time.sleep(0.01)
    began = time.monotonic()
    stop_commands()
    assert time.monotonic() - began < 4
    assert [one.process.returncode for one in running] == [-9, -9, -9]


def test_a_command_has_no_folder_that_goes_with_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.spark.session_folder._outside", [str(tmp_path)])
    monkeypatch.setenv("TMPDIR", str(tmp_path / "of-the-watch"))
    program = "import json, os; print(json.dumps({'folder': os.environ['TMPDIR']}))"
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", program))
    assert run_command(tmp_path / "fleet.toml", ["list"]).document == {"folder": str(tmp_path)}


def test_a_full_snapshot_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lines that `create` prints itself: nobody sees those of the watch's command."""
    left_out = [
        LeftOut("s1", LeftOutKind.LARGE_OBJECTS, "pg_largeobject", "why", 6),
        LeftOut("s1", LeftOutKind.APPEND_ONLY_TABLE, "public.log", "why"),
    ]
    document = {"bytes": 1, "seconds": 2.0, "warnings": ["a note"], "left_out": to_builtins(left_out)}
    printed = json.dumps(json.dumps(document))
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", f"print({printed})"))
    fleet = replace(new_fleet(), watch=WatchTable(every=Interval(60), name="w-{n}"))
    found = take_full(FleetSource(tmp_path / "fleet.toml", fleet, b"", b""), [].append)
    assert found.text == "full snapshot w-1: 1 B, 2.0 s"
    note, large, log = found.notes
    assert note == "a note"
    assert [large, f"warning: {log}"] == left_out_lines(left_out)
    assert large.startswith("not in the snapshot: 6 large objects (not restored): 6 on s1")


def test_notes_of_a_full_snapshot_are_logged_while_it_runs_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends only after somebody has seen the note."""
    seen = tmp_path / "seen"
    program = f"""
import json, pathlib, sys, time
notes = ["a slot waits", "snapshot commits"] if sys.argv[-2] == "create" else []
for line in ("no JSON", '{{"step": "slots", "done": 1}}', *(json.dumps({{"note": note}}) for note in notes)):
    print(line, file=sys.stderr, flush=True)
deadline = time.monotonic() + 60
while notes and not pathlib.Path({str(seen)!r}).exists() and time.monotonic() < deadline:
    time.sleep(0.05)
print(json.dumps({{"bytes": 1, "seconds": 2.0, "warnings": [*notes, "said at the end"], "left_out": []}}))
sys.exit(0 if time.monotonic() < deadline else 6)
"""
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", program))
    logged: list[str] = []

    def log(text: str) -> None:
        logged.append(text)
        seen.touch()

    fleet = replace(new_fleet(), watch=WatchTable(every=Interval(60), name="w-{n}"))
    found = take_full(FleetSource(tmp_path / "fleet.toml", fleet, b"", b""), log)
    assert logged == ["a slot waits", "snapshot commits"]
    assert found.notes == ("said at the end",)


def test_the_lines_of_a_commands_hint_stay_lines() -> None:
    document = ERROR | {"hint": "run:\n  ALTER TABLE a;\n  ALTER TABLE b;"}
    with pytest.raises(CommandFailedError) as raised:
        verdict_of("check of a", CommandResult(6, dict(document)), new_fleet())
    assert raised.value.hint == document["hint"]


def test_a_prune_says_what_is_gone_of_each_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [{"snapshot": name, "kind": kind} for name, kind in (("a", "delete"), ("b", "prune"), ("c", "delete"))]
    printed = json.dumps(json.dumps({"done": done, "warnings": ["every snapshot has conflicts"]}))
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", f"print({printed})"))
    source = FleetSource(tmp_path / "fleet.toml", new_fleet(), b"", b"")
    found = prune(source)
    assert found.text == "deleted a, c; removed the increments of b"
    assert found.notes == ("every snapshot has conflicts",)
    assert found.finding is None


def test_a_prune_says_what_it_gave_up_of_merged_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = {"snapshot": "a", "begins_at": 9, "increments": [0, 1, 2], "refused": []}
    printed = json.dumps(json.dumps({"done": [], "given_up": [dropped], "warnings": []}))
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", f"print({printed})"))
    found = prune(FleetSource(tmp_path / "fleet.toml", new_fleet(), b"", b""))
    assert found.text == "gave up 3 restore points of a before increment 9"


@pytest.mark.parametrize(
    ("code", "left", "why"),
    [
        (
            6,
            {"slots_left": ["cutline_x on a-b1"]},
            "slot not dropped, because the node can't be reached: cutline_x on a-b1",
        ),
        (3, {"refused": [{"object": "snapshots/a/base/x", "why": "it is locked"}]}, "it is locked"),
    ],
)
def test_a_prune_that_is_unfinished_says_which_removal_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: dict[str, object], why: str
) -> None:
    """Also if the snapshots exceed the quota: that is reported once everything else could be removed."""
    source = FleetSource(tmp_path / "fleet.toml", new_fleet(), b"", b"")
    quota = {"bytes": 1, "exceeded_by": 1}
    for part in ("done", "given_up"):
        one = {"snapshot": "a", "kind": "delete", "begins_at": 9, "increments": [0], **left}
        document = {"done": [], "given_up": [], "warnings": [], "quota": quota, "bytes_left": 2, part: [one]}
        program = f"import sys; print({json.dumps(json.dumps(document))}); sys.exit({code})"
        monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", program))
        if code == REFUSED:
            # The store may refuse for weeks: the next prune is that of the next day.
            found = prune(source).finding
            assert found is not None
            assert (found.code, found.slug) == (REFUSED, "removal-unfinished")
            assert found.message.startswith("prune could not finish removing a; the first problem: ")
            assert why in found.message
            continue
        with pytest.raises(
            CommandFailedError, match="prune could not finish removing a; the first problem: "
        ) as raised:
            prune(source)
        assert raised.value.exit_code == code
        assert why in raised.value.message


@pytest.mark.parametrize("code", [3, 7])
def test_a_prune_that_left_out_what_is_being_read_follows_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Unless somebody has to do something before: then it follows a day later, and says both."""
    document = {
        "done": [{"snapshot": "a", "kind": "delete", "state": "done"}],
        "in_use": [{"snapshot": "b", "message": "snapshot b is being restored"}],
        "quota": {"bytes": 1, "exceeded_by": code == 3},
        "bytes_left": 2,
        "warnings": [],
    }
    program = f"import sys; print({json.dumps(json.dumps(document))}); sys.exit({code})"
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", program))
    source = FleetSource(tmp_path / "fleet.toml", new_fleet(), b"", b"")
    if code == 7:
        with pytest.raises(SnapshotReadError, match=r"^deleted a; snapshot b is being restored$"):
            prune(source)
        return
    found = prune(source)
    assert (found.text, found.notes) == ("deleted a", ("snapshot b is being restored",))
    assert found.finding is not None
    assert found.finding.slug == "quota-exceeded"


def test_a_prune_that_leaves_more_than_the_quota_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document: dict[str, object] = {"warnings": [], "bytes_left": 3 << 20, "quota": {"bytes": 2 << 20}}
    source = FleetSource(tmp_path / "fleet.toml", new_fleet(), b"", b"")

    def print_done(state: str, exceeded_by: int, code: int) -> None:
        document["done"] = [{"snapshot": "a", "kind": "delete", "state": state}]
        document["quota"] = {"bytes": 2 << 20, "exceeded_by": exceeded_by}
        program = f"import sys; print({json.dumps(json.dumps(document))}); sys.exit({code})"
        monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", program))

    print_done("done", 1 << 20, 3)
    found = prune(source)
    assert found.text == "deleted a"
    assert found.finding is not None
    assert (found.finding.code, found.finding.slug) == (3, "quota-exceeded")
    assert found.finding.message == "the snapshots take 3.0 MiB, 1.0 MiB more than the quota of 2.0 MiB"
    print_done("done", 0, 0)
    assert prune(source).finding is None
    # What is unfinished is reported first, whatever the quota.
    print_done("unfinished", 1 << 20, 3)
    unfinished = prune(source).finding
    assert unfinished is not None
    assert unfinished.slug == "removal-unfinished"


def test_a_command_that_was_started_when_a_signal_came_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutline.cli.watch.running_command, "PROGRAM", ("-c", "import time; time.sleep(600)"))
    started: list[RunningCommand] = []
    spawn = cutline.cli.watch.running_command._spawn

    def spawn_and_signal(*arguments: Any) -> RunningCommand:
        # The main thread is interrupted before it has come to know the command.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        started.append(spawn(*arguments))
        return started[0]

    monkeypatch.setattr(cutline.cli.watch.running_command, "_spawn", spawn_and_signal)
    with pytest.raises(KeyboardInterrupt):
        start_command(tmp_path, ["check"])
    stop_commands()
    assert [one.process.returncode for one in started] == [-signal.SIGTERM]


def test_the_log_names_the_part_that_decides_and_none_that_is_allowed() -> None:
    """Of the parts of a snapshot, and of snapshots."""
    one_copy = Skipped("rows of shard A", "no backup copy to compare with", is_one_copy=True)
    absent = Skipped("the copy of B-b1", "increment 9 and later leave it out: it was away", is_absent=True)
    reports = (
        SnapshotReport("a", 3, Compared(objects=1), skipped=[one_copy], allows_one_copy=True),
        SnapshotReport("b", 3, Compared(objects=1), skipped=[one_copy, absent], allows_one_copy=True),
    )
    report = CheckReport(reports, 1.0)
    finding = verdict_of("check", CommandResult(report.exit_code, report.to_json()), new_fleet()).finding
    assert finding is not None
    assert finding.hint == f"not compared: {absent.what}: {absent.why}"


def test_what_the_rules_accept_is_no_finding() -> None:
    fleet = new_fleet()
    accepts = replace(fleet, watch=WatchTable(every=Interval(60), accept_inconclusive=True))
    document = {"result": "inconclusive", "snapshots": [{"skipped": [{"what": "rows of shard s3", "why": "no copy"}]}]}
    inconclusive, conflicts = CommandResult(4, document), CommandResult(1, {"result": "conflicts"})
    assert verdict_of("check of a", inconclusive, fleet).finding is not None
    accepted = verdict_of("check of a", inconclusive, accepts)
    assert (accepted.finding, accepted.text) == (None, "check of a: inconclusive")
    assert accepted.notes == ("not compared: rows of shard s3: no copy",)
    assert verdict_of("check of a", conflicts, accepts).finding is not None
