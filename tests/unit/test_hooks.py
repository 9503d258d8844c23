"""Hooks and requests to a monitor, of commands as processes on a store in a folder; no node is reachable."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cutline.cli.output.failure import BUSY, CANCELLED, INTERRUPTED, CommandFailure
from cutline.cli.output.hooks import HookedRun, ping
from cutline.fleet.config import Fleet, FleetFileError, HooksTable, load_fleet
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.encryption.key_documents import ensure_data_key
from cutline.storage.errors import redact
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import command_line, run_command

APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"
NODE = '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
SECRET = "b6e27f05-aaaa-4c4c-8d8d-0123456789ab"


class Monitor:
    """A local HTTP server that keeps the requests, and answers all of them with `status`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.status = 200
        monitor = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the base class's name
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                monitor.requests.append((self.command, self.path, body.decode()))
                self.send_response(monitor.status)
                self.end_headers()

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Write nothing to stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    found = Monitor()
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def write_fleet(tmp_path: Path, more: str) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(f'name = "shop"\nstore = "file://{tmp_path}/store"\n{more}\n{NODE}')
    fleet = load_fleet(path)
    ensure_identity(fleet.store.open(), fleet)
    return fleet


def hooks_of(tmp_path: Path, **programs: str) -> str:
    """Return a [hooks] table whose programs are these Python texts; by default they keep their events in a file."""
    words = {name: json.dumps([sys.executable, "-c", code, str(tmp_path / name)]) for name, code in programs.items()}
    return "[hooks]\n" + "".join(f"{name} = {listed}\n" for name, listed in words.items())


def events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_hooks_get_the_command_before_and_its_result_after(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, before=APPEND, after=APPEND))
    code, document = run_here(fleet, "gc", "--yes")
    assert code == 0, document
    (before,), (after,) = events(tmp_path / "before"), events(tmp_path / "after")
    expected = {"schema": "cutline/hook/1", "event": "before", "fleet": "shop", "command": "gc", "snapshot": None}
    assert expected.items() <= before.items()
    assert before["operation"] is None
    assert after["run"] == before["run"]
    assert (after["code"], after["error"], after["message"], after["hint"]) == (0, None, None, None)
    assert after["result"]["schema"] == "cutline/gc/1"
    assert after["operation"]
    assert after["seconds"] >= 0


def test_an_error_is_in_the_event_after_the_command(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, after=APPEND))
    code, document = run_here(fleet, "create", "nightly")
    assert code == 6, document
    (after,) = events(tmp_path / "after")
    assert {name: after[name] for name in ("code", "error", "message", "hint")} == {
        name: document[name] for name in ("code", "error", "message", "hint")
    }
    assert (after["command"], after["snapshot"], after["incremental"], after["result"]) == (
        "create", "nightly", False, None
    )  # fmt: skip


def test_a_hook_that_fails_is_noticed_if_the_parent_process_ignores_sigchld(tmp_path: Path) -> None:
    """Then the system forgets a process when it ends, and its exit code with it."""
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, before="raise SystemExit(9)"))
    command = shlex.join(command_line(fleet, "gc", "--yes"))
    done = subprocess.run(["bash", "-c", f"trap '' CHLD; exec {command}"], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "ended with exit code 9" in done.stderr


def test_a_hook_that_fails_refuses_the_command_and_its_output_is_shown(tmp_path: Path) -> None:
    refuse = "import sys; print('the nightly window is closed'); sys.exit(9)"
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, before=refuse, after=APPEND))
    code, document = run_here(fleet, "gc", "--yes")
    assert (code, document["error"]) == (3, "hook-failed")
    assert document["message"].startswith("gc was not begun: [hooks] before ")
    assert document["message"].endswith("ended with exit code 9: the nightly window is closed")
    assert not (tmp_path / "after").exists()
    # A dry run has no hooks.
    assert run_here(fleet, "gc", "--dry-run")[0] == 0


# Every command that changes something, with the name of the command in its events, and the snapshot that it names.
CHANGING = [
    ("merge nightly", "merge", "nightly"),
    ("copy nightly --to {folder}/second", "copy", "nightly"),
    ("copy --all --to {folder}/second", "copy", None),
    ("end nightly --yes", "end", "nightly"),
    ("keep nightly", "keep", "nightly"),
    ("keep nightly --release", "keep", "nightly"),
    ("init", "init", None),
    ("key add --key-file {folder}/another-key", "key-add", None),
    ("key remove 0123456789abcdef", "key-remove", None),
    ("delete nightly --yes", "delete", "nightly"),
    ("prune --yes", "prune", None),
    ("gc --yes", "gc", None),
]


def write_encrypted_fleet(tmp_path: Path, more: str) -> Fleet:
    for name, digits in (("own-key", "11"), ("another-key", "22")):
        (tmp_path / name).write_text(digits * 32)
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "fleet.toml"
    lines = f'name = "shop"\nstore = "file://{tmp_path}/store"\n[encryption]\nkey_file = "{tmp_path}/own-key"\n'
    path.write_text(f"{lines}{more}\n{NODE}")
    fleet = load_fleet(path)
    assert fleet.encryption is not None
    ensure_data_key(fleet.store.open_raw(), fleet.encryption.read_key())
    ensure_identity(fleet.store.open(), fleet)
    return fleet


@pytest.mark.parametrize(("line", "command", "snapshot"), CHANGING)
def test_every_command_that_changes_something_has_hooks(
    tmp_path: Path, line: str, command: str, snapshot: str | None
) -> None:
    fleet = write_encrypted_fleet(tmp_path, hooks_of(tmp_path, before=APPEND, after=APPEND))
    code, document = run_here(fleet, *line.format(folder=tmp_path).split())
    (before,), (after,) = events(tmp_path / "before"), events(tmp_path / "after")
    assert [(one["command"], one["snapshot"], one["run"]) for one in (before, after)] == [
        (command, snapshot, before["run"])
    ] * 2
    assert after["code"] == code
    assert (after["error"], after["message"]) == (document.get("error"), document.get("message"))
    assert (after["result"] is None) == bool(code)


@pytest.mark.parametrize(("line", "command", "snapshot"), CHANGING)
def test_a_hook_that_fails_refuses_every_command_that_changes_something(
    tmp_path: Path, line: str, command: str, snapshot: str | None
) -> None:
    fleet = write_encrypted_fleet(tmp_path, hooks_of(tmp_path, before="raise SystemExit(9)"))
    files = sorted(tmp_path.rglob("*"))
    code, document = run_here(fleet, *line.format(folder=tmp_path).split())
    assert (code, document["error"]) == (3, "hook-failed"), snapshot
    assert document["message"].startswith(f"{command} was not begun: [hooks] before ")
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("line", ["merge nightly", "copy --all --to {folder}/second", "end nightly", "gc"])
def test_a_dry_run_has_no_hooks(tmp_path: Path, line: str) -> None:
    fleet = write_encrypted_fleet(tmp_path, hooks_of(tmp_path, before=APPEND, after=APPEND))
    run_here(fleet, *line.format(folder=tmp_path).split(), "--dry-run")
    assert not (tmp_path / "before").exists()
    assert not (tmp_path / "after").exists()


def test_a_hook_that_hangs_is_killed(tmp_path: Path) -> None:
    hang = "import time; print('waiting', flush=True); time.sleep(600)"
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, before=hang) + 'timeout = "1s"\n')
    code, document = run_here(fleet, "gc", "--yes")
    assert code == 3
    assert document["message"].endswith("was still running after 1 s and was killed: waiting")


def test_a_hook_that_is_no_program_refuses_the_command(tmp_path: Path) -> None:
    code, document = run_here(write_fleet(tmp_path, '[hooks]\nbefore = ["/nowhere/hook"]\n'), "gc", "--yes")
    assert code == 3
    assert "[hooks] before /nowhere/hook" in document["message"]


def test_a_hook_that_fails_after_the_command_is_a_warning(tmp_path: Path) -> None:
    warned: list[str] = []
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, after="raise SystemExit('no space')"))
    run = HookedRun(fleet, "gc", None, warned.append)
    run.end(CommandFailure(0, "", ""))
    assert warned[0].endswith("ended with exit code 1: no space")
    # What it prints is not mixed with the result.
    assert run_command(fleet, "gc", "--yes")[0] == 0


def test_a_hook_without_a_file_for_its_output_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    fleet = write_fleet(tmp_path, hooks_of(tmp_path, after=APPEND))
    # Somebody has cleaned up, or the disk is full.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    HookedRun(fleet, "create", None, warned.append).end(CommandFailure(0, "", ""))
    assert (
        "was not run: no temporary file for its output could be created: [Errno 2] No such file or directory"
        in warned[0]
    )
    assert not (tmp_path / "after").exists()


def test_the_temporary_files_of_a_hook_outlive_the_command(tmp_path: Path) -> None:
    keep = "import sys, tempfile; open(sys.argv[1], 'w').write(tempfile.mkdtemp(prefix='of-a-hook-'))"
    assert run_here(write_fleet(tmp_path, hooks_of(tmp_path, before=keep)), "gc", "--yes")[0] == 0
    kept = Path((tmp_path / "before").read_text())
    assert kept.is_dir(), "the command deletes its own folder"
    kept.rmdir()


def test_a_failure_is_reported_to_the_monitor_with_its_message(tmp_path: Path, monitor: Monitor) -> None:
    url = f"{monitor.url}/{SECRET}/{{command}}?create=1"
    fleet = write_fleet(tmp_path, f'[notify]\nsuccess_url = "{url}"\n')
    code, document = run_here(fleet, "create", "nightly")
    assert code == 6
    ((method, path, body),) = monitor.requests
    assert (method, path) == ("POST", f"/{SECRET}/create/fail?create=1")
    assert body == f"exit code 6: {document['message']}\nhint: {document['hint']}"
    # Housekeeping is reported only if fleet.toml says so.
    assert run_here(fleet, "gc", "--yes")[0] == 0
    assert len(monitor.requests) == 1


@pytest.mark.parametrize(("line", "command"), [
    ("copy --all --to {folder}/second", "copy"), ("prune --yes", "prune"), ("gc --yes", "gc"),
])  # fmt: skip
def test_a_command_that_fleet_toml_names_reports_its_success(
    tmp_path: Path, monitor: Monitor, line: str, command: str
) -> None:
    of = f'success_of = ["{command}", "merge"]\n'
    fleet = write_fleet(tmp_path, f'[notify]\nsuccess_url = "{monitor.url}/{{command}}"\n{of}')
    words = line.format(folder=tmp_path).split()
    done, _ = run_here(fleet, *words)
    # A prune needs the fleet's lock, and the node can't be reached.
    assert done == (6 if command == "prune" else 0)
    assert [(method, path) for method, path, _ in monitor.requests] == [
        ("POST", f"/{command}/fail") if done else ("GET", f"/{command}")
    ]
    assert run_here(fleet, *(word for word in words if word != "--yes"), "--dry-run")[0] == 0
    # It fails because there is no such snapshot.
    code, document = run_here(fleet, "merge", "nightly")
    assert code == 3
    assert [(method, path) for method, path, _ in monitor.requests[1:]] == [("POST", "/merge/fail")]
    assert monitor.requests[1][2].startswith(f"exit code 3: {document['message']}")
    # Those that it does not name report nothing any more.
    assert run_here(fleet, "create", "nightly")[0] == 6
    assert len(monitor.requests) == 2


def test_a_success_is_a_request_to_the_address_itself(monitor: Monitor) -> None:
    assert ping(f"{monitor.url}/{SECRET}", CommandFailure(0, "", "")) == ""
    assert monitor.requests == [("GET", f"/{SECRET}", "")]


@pytest.mark.parametrize("code", [BUSY, CANCELLED, INTERRUPTED])
def test_an_end_that_says_nothing_about_the_fleet_is_not_reported(tmp_path: Path, monitor: Monitor, code: int) -> None:
    fleet = write_fleet(tmp_path, f'[notify]\nsuccess_url = "{monitor.url}"\n')
    HookedRun(fleet, "create", "nightly", print).end(CommandFailure(code, "", "stopped"))
    assert monitor.requests == []


def test_a_monitor_that_refuses_or_is_away_is_a_warning_without_its_address(tmp_path: Path, monitor: Monitor) -> None:
    fleet = write_fleet(tmp_path, f'[notify]\nsuccess_url = "{monitor.url}/{SECRET}"\n')
    warned: list[str] = []
    monitor.status = 404
    HookedRun(fleet, "check", None, warned.append).end(CommandFailure(0, "", ""))
    away = replace(fleet, success_url=f"http://127.0.0.1:1/{SECRET}")
    HookedRun(away, "check", None, warned.append).end(CommandFailure(0, "", ""))
    assert warned[0] == "the end of check could not be reported to [notify] success_url: the answer was 404 Not Found"
    assert len(warned) == 2
    assert SECRET not in "".join(warned)


def test_the_address_may_be_in_a_variable_and_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"https://hc-ping.example/{SECRET}"
    monkeypatch.setenv("PING_URL", url)
    fleet = write_fleet(tmp_path, '[notify]\nsuccess_url = "${PING_URL}"\n')
    assert fleet.success_url == url
    assert SECRET not in redact(f"GET {url}")
    assert SECRET not in repr(fleet)


@pytest.mark.parametrize(("more", "problem"), [
    ('[notify]\nsuccess_url = "ftp://host/x"', "is not an address that begins with https:// or http://"),
    ('[notify]\nsuccess_url = "https://"', "is not an address"),
    ('[notify]\nsuccess_of = ["creates"]', "`notify.success_of`"),
    ('[notify]\nsuccess_of = []', "`notify.success_of`"),
    ('[hooks]\nbefore = []', "`hooks.before`"),
    ('[hooks]\ntimeout = "0"', "`hooks.timeout` is 0"),
    ('[limits]\nread = "50MB"', 'a rate is a string such as "50MB/s"'),
    ('[limits]\nhours = "late"', "are not hours such as"),
    ('[limits]\nstore = "5MB/s"\n[spark]\nmaster = "yarn"', "`limits.store` is shared by all tasks"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, more: str, problem: str) -> None:
    with pytest.raises(FleetFileError, match=problem):
        write_fleet(tmp_path, f"{more}\n")


def test_without_tables_there_are_no_hooks(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, "")
    assert fleet.hooks == HooksTable()
    assert (fleet.success_url, fleet.hours, fleet.notify) == ("", None, ())
    assert fleet.store.bytes_per_second is None
