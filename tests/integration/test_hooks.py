"""Hooks and requests to a monitor, of commands that change a real server's chain, and of a watch's increments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cutline.cli.watch.tasks import take_increment
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from tests.commands.snapshot_runs import run_command
from tests.integration.own_database import own_database
from tests.integration.refusing import execute
from tests.unit.test_hooks import APPEND, Monitor, events, monitor

NAME = "daily"
__all__ = ["monitor"]


def test_each_success_is_reported_once(shared_fleet: EmbeddedFleet, tmp_path: Path, monitor: Monitor) -> None:
    words = json.dumps([sys.executable, "-c", APPEND, str(tmp_path / "after")])
    tables = f'[notify]\nsuccess_url = "{monitor.url}/{{command}}"\n[hooks]\nafter = {words}\n'
    with own_database(shared_fleet, tmp_path, "hooked", tables) as fleet:
        execute(fleet.nodes[0].dsn, "CREATE TABLE item (id int PRIMARY KEY)", "INSERT INTO item VALUES (1)")
        assert run_command(fleet, "init")[0] == 0
        code, full = run_command(fleet, "create", NAME)
        assert code == 0, full
        assert monitor.requests == [("GET", "/create", "")]
        _, increment = run_command(fleet, "create", NAME, "--incremental")
        code, _ = run_command(fleet, "check", NAME)
        # A standby's copy is missing.
        assert code == 4
        # An increment of a watch runs in the watch's own process.
        warned: list[str] = []
        commit, _ = take_increment(load_fleet(fleet.path), NAME, warned.append, [].append)
        assert warned == []
        assert [(method, path) for method, path, _ in monitor.requests] == [
            ("GET", "/create"),
            ("GET", "/create"),
            ("POST", "/check/fail"),
            ("GET", "/create"),
        ]
        assert monitor.requests[2][2].startswith("exit code 4: inconclusive")
        init, *told = events(tmp_path / "after")
        assert init["command"] == "init"
        assert [one["command"] for one in told] == ["create", "create", "check", "create"]
        assert [one["operation"] for one in told[:2]] == [full["operation"], increment["operation"]]
        assert told[3]["operation"] == commit.operation
        assert told[3]["result"]["increment"] == commit.increment
        assert told[0]["result"]["cut"]["id"] == full["cut"]["id"]


def test_commands_on_a_chain_tell_their_hook_what_they_have_changed(
    shared_fleet: EmbeddedFleet, tmp_path: Path, monitor: Monitor
) -> None:
    words = json.dumps([sys.executable, "-c", APPEND, str(tmp_path / "after")])
    of = f'[notify]\nsuccess_url = "{monitor.url}/{{command}}"\nsuccess_of = ["merge", "copy"]\n'
    with own_database(shared_fleet, tmp_path, "hooked", f"{of}[hooks]\nafter = {words}\n") as fleet:
        execute(fleet.nodes[0].dsn, "CREATE TABLE item (id int PRIMARY KEY)", "INSERT INTO item VALUES (1)")
        ran: list[tuple[str, str | None, dict[str, Any]]] = []
        for line in ("init", f"create {NAME}", f"create {NAME} --incremental", f"merge {NAME}", f"keep {NAME}",
                     f"keep {NAME} --release", f"copy {NAME} --to {tmp_path}/second", f"end {NAME} --yes"):  # fmt: skip
            command, _, name = line.partition(" ")
            code, document = run_command(fleet, *line.split())
            assert code == 0, document
            ran.append((command, name.split()[0] if name else None, document))
        told = events(tmp_path / "after")
        assert [(one["command"], one["snapshot"], one["result"]) for one in told] == ran
        assert [one["code"] for one in told] == [0] * len(ran)
        recorded = {one["command"]: one["operation"] for one in told}
        assert recorded["merge"] == ran[3][2]["operation"]
        assert recorded["copy"] == ran[6][2]["operation"]
        assert monitor.requests == [("GET", "/merge", ""), ("GET", "/copy", "")]
