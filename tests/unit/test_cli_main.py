"""The command line from outside: exit codes, the error document, and options before or after the command.

They run as real subprocesses, because the exit code is set where the process ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import cutline.cli.main
import cutline.cli.output.failure as failure
from cutline.cli.entry import HINT
from cutline.cli.main import COMMANDS, hoist_shared_options, run
from cutline.cli.output.failure import MEANINGS, STOPPED_HINTS
from cutline.storage.errors import UsageError

PROGRAM = [sys.executable, "-c", "from cutline.cli.entry import main; main()"]

# A stand-in for a command, so that these tests don't depend on the behaviour of a real one.
STAND_IN = """
import sys, types
import typer
from cutline.cli import main
from cutline.cli.output.results import emit, progress
from cutline.storage.errors import BusyError

def stand_in(context: typer.Context, how: str) -> None:
    if how == "load":
        context.find_root().obj.load_fleet()
    if how == "busy":
        raise BusyError("a is busy", hint="wait", details={"operation": "x"})
    if how == "bug":
        raise ZeroDivisionError("password=secret")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how.startswith("late"):
        import os
        ended = main.end_session
        main.end_session = lambda: (os.kill(os.getpid(), int(how.split()[1])), ended())
    if how == "wait":
        import time
        sys.stderr.write("waiting\\n"); sys.stderr.flush()
        time.sleep(60)
    if how == "waited":
        import _thread, signal, threading
        # As a signal that comes just before the wait, it does not end that.
        threading.Timer(0.3, _thread.interrupt_main, [signal.SIGTERM]).start()
        threading.Event().wait(20)
    if how == "finalized":
        import os, signal, time
        class Finalized:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)
        one = Finalized()
        del one
        time.sleep(20)
    if how == "nested":
        import os, signal, time
        def signal_again(frame, event, argument):
            # In what the handler calls, which may hold a lock.
            if frame.f_back is not None and frame.f_back.f_code is main._unwind.__code__:
                sys.settrace(None)
                sys.stderr.write("again\\n")
                os.kill(os.getpid(), signal.SIGTERM)
        sys.settrace(signal_again)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    if how == "twice":
        import os, signal, time
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            sys.stderr.write("cleaned\\n")
    with progress(context) as steps:
        steps.step("count", total=2, unit="rows")
        if how == "wait in a step":
            import time
            sys.stderr.write("waiting\\n")
            time.sleep(60)
        steps.advance(2)
        steps.note("nearly there")
    code = 0 if how == "done" else 4
    emit(context, {"schema": "cutline/stand-in/1", "how": how}, [f"it was {how} [here]"], code=code)
    raise typer.Exit(code)

sys.modules["stand_in"] = types.SimpleNamespace(stand_in=stand_in)
main.COMMANDS["stand-in"] = main.CommandEntry("stand_in", "stand_in", "Stand in.")
main.main()
"""


def run_snapshot(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run(PROGRAM, arguments, environment)


def run_stand_in(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-c", STAND_IN, "stand-in"], arguments, environment)


def _run(
    program: list[str], arguments: tuple[str, ...], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )


def read_document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON document on stdout."""
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_help_lists_every_command_and_every_exit_code() -> None:
    done = run_snapshot("--help", COLUMNS="120")
    assert done.returncode == 0
    for name, entry in COMMANDS.items():
        assert name in done.stdout
        assert entry.help in done.stdout
    shown = " ".join(done.stdout.split())
    for code, meaning in MEANINGS.items():
        assert f" {code} {meaning} " in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_flags_plainly_and_what_may_be_left_out_in_brackets(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.match(rf"Usage: snapshot {name}( [A-Z]+(\[@N\])?| \[[A-Z]+\]| \[?COMMAND …\]?)* \[OPTIONS\]\n", text)
    assert not re.search(r"<(bool|str|int|float)>|{[A-Z]|\[(required|default)", text)
    assert max(len(line) for line in text.splitlines()) <= 60
    assert re.search(r"^  --help  +Show this help\.$", text, re.MULTILINE)


def test_the_version_is_printed_as_text_or_json() -> None:
    assert run_snapshot("--version").stdout.startswith("snapshot 0.")
    assert read_document(run_snapshot("--version", "--json"))["schema"] == "cutline/version/1"


def test_running_without_a_command_shows_the_help_and_is_a_usage_error() -> None:
    done = run_snapshot()
    assert done.returncode == 2
    assert "Usage: snapshot" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["--no-such-option"], ["--fleet"], ["demo", "--json", "--bogus"]]
)
def test_a_mistake_on_the_command_line_exits_2(arguments: list[str]) -> None:
    done = run_snapshot(*arguments)
    assert done.returncode == 2
    if "--json" in arguments:
        assert read_document(done)["error"] == "usage"
    else:
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert "hint: see: snapshot" in done.stderr


def test_a_mistyped_command_gets_a_suggestion() -> None:
    assert "'restore'" in run_snapshot("restor", "x").stderr


def test_a_usage_error_is_one_json_document_of_the_documented_form() -> None:
    done = run_snapshot("no-such-command", "--json")
    assert done.returncode == 2
    assert done.stderr == ""
    found = read_document(done)
    assert list(found) == ["schema", "code", "error", "message", "hint", "details"]
    assert found["schema"] == "cutline/error/1"
    assert (found["code"], found["error"]) == (2, "usage")


def test_a_missing_fleet_file_exits_2_and_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "absent.toml"
    for done in (run_stand_in("load", "--fleet", str(missing)), run_stand_in("load", SNAPSHOT_FLEET=str(missing))):
        assert done.returncode == 2
        assert f"error: no fleet file at {missing}" in done.stderr
    assert read_document(run_stand_in("load", f"--fleet={missing}", "--json"))["error"] == "fleet-file"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_after_the_result_changes_nothing(number: signal.Signals) -> None:
    done = run_stand_in(f"late {int(number)}", "--json", "--quiet")
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1), done.stderr
    assert read_document(done)["schema"] == "cutline/stand-in/1"


def test_an_error_exits_with_its_own_code_and_shows_its_hint() -> None:
    done = run_stand_in("busy")
    assert done.returncode == 7
    assert done.stdout == ""
    assert done.stderr == "error: a is busy\nhint: wait\n"
    assert read_document(run_stand_in("busy", "--json")) == {
        "schema": "cutline/error/1",
        "code": 7,
        "error": "busy",
        "message": "a is busy",
        "hint": "wait",
        "details": {"operation": "x"},
    }


def test_a_bug_exits_70_and_keeps_its_traceback_in_a_private_file(tmp_path: Path) -> None:
    done = run_stand_in("bug", "--json", TMPDIR=str(tmp_path))
    assert done.returncode == 70
    found = read_document(done)
    kept = Path(found["details"]["traceback"])
    assert kept.parent == tmp_path
    assert kept.stat().st_mode & 0o077 == 0
    assert "ZeroDivisionError: password=secret" in kept.read_text()
    assert "secret" not in done.stdout + done.stderr


def test_a_bug_is_reported_where_no_file_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(failure, "lasting_folder", lambda: str(tmp_path / "removed"))
    found = failure.failure_of(ZeroDivisionError("password=secret"))
    assert (found.code, found.message) == (70, "a bug: ZeroDivisionError")
    assert "--verbose" in found.hint


def test_an_interrupt_exits_130() -> None:
    assert run_stand_in("interrupt").returncode == 130
    assert read_document(run_stand_in("interrupt", "--json"))["error"] == "interrupted"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 8), (signal.SIGHUP, 8)])
def test_a_signal_ends_the_command_with_its_code(number: signal.Signals, code: int) -> None:
    program = [sys.executable, "-c", STAND_IN, "stand-in", "wait"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "waiting\n"
        process.send_signal(number)
        began = time.monotonic()
        process.communicate(timeout=20)
        assert process.returncode == code
        assert time.monotonic() - began < 10


# What imports cli.main gets a signal there.
IMPORTING = """
import os, sys
class Finder:
    def find_spec(name, *_):
        if name == "cutline.cli.main":
            os.kill(os.getpid(), int(sys.argv.pop(1)))
            os._exit(99)
sys.meta_path.insert(0, Finder)
from cutline.cli.entry import main
main()
"""


@pytest.mark.parametrize("words", [[], ["--json"], ["--", "--json"]], ids=" ".join)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_imports_ends_the_command_as_later_ones_do(
    number: signal.Signals, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = _run([sys.executable, "-c", IMPORTING], (str(int(number)), *words), {})
    interrupt = KeyboardInterrupt() if number == signal.SIGINT else KeyboardInterrupt(number)
    # Nothing had begun, and the message says so.
    expected = replace(failure.failure_of(interrupt), hint=HINT)
    code = failure.report(expected, interrupt, json=words == ["--json"], verbose=False)
    assert (done.returncode, (done.stdout, done.stderr)) == (code, capsys.readouterr())


# What imports the command, which is after the program's own handlers are there, gets a signal.
STARTING = """
import os, sys
number = int(sys.argv.pop(1))
class Finder:
    def find_spec(name, *_):
        if name == "cutline.cli.commands.watch":
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder)
from cutline.cli.entry import main
main()
"""


@pytest.mark.parametrize("words", [["watch"], ["--fleet", "check", "watch", "--json"]], ids=" ".join)
@pytest.mark.parametrize("program", [IMPORTING, STARTING], ids=["during the imports", "later"])
def test_a_watch_that_sigterm_stops_while_it_starts_has_not_failed(program: str, words: list[str]) -> None:
    done = _run([sys.executable, "-c", program], (str(int(signal.SIGTERM)), *words), {})
    expected = ("", "stopped by SIGTERM\n")
    if "--json" in words:
        expected = ('{"schema": "cutline/watch/1", "operation": null, "tasks": {}}\n', "")
    assert (done.returncode, done.stdout, done.stderr) == (0, *expected)
    hangup = _run([sys.executable, "-c", program], (str(int(signal.SIGHUP)), *words), {})
    assert hangup.returncode == 8


@pytest.mark.parametrize("program", [IMPORTING, STAND_IN], ids=["during the imports", "later"])
def test_a_command_that_is_to_ignore_the_end_of_its_terminal_does(program: str) -> None:
    """As by nohup; a shell's background jobs ignore Ctrl-C, too."""
    words = [str(int(signal.SIGHUP))] if program == IMPORTING else ["stand-in", "wait"]
    line = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-c", program, *words]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        if program == STAND_IN:
            assert process.stderr.readline() == "waiting\n"
            process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.terminate()
        assert process.wait(20) == (99 if program == IMPORTING else 8)


def test_a_command_cleans_up_when_its_terminal_is_gone(tmp_path: Path) -> None:
    """As where an ssh session ends: it gets SIGHUP, and can't write any more."""
    master, slave = os.openpty()
    program = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY)\n{STAND_IN}"
    words = [sys.executable, "-c", program, "stand-in", "wait in a step"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    ) as process:
        os.close(slave)
        shown = b""
        while b"waiting" not in shown:
            shown += os.read(master, 4096)
        assert list(tmp_path.iterdir())
        os.close(master)
        assert process.wait(20) == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["waited", "finalized", "nested"])
def test_a_signal_is_never_late_or_lost(how: str) -> None:
    """It comes just before the command waits for a lock, in a finalizer, or while another is handled."""
    began = time.monotonic()
    done = run_stand_in(how)
    again = "again\n" * (how == "nested")
    assert (done.returncode, done.stderr) == (8, f"{again}error: stopped by SIGTERM\n"), done
    assert time.monotonic() - began < 15


def test_a_stopped_command_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert STOPPED_HINTS.keys() < COMMANDS.keys()
    monkeypatch.setattr("cutline.cli.commands.check.check_request", stop)
    assert run(["check"]) == 130
    assert capsys.readouterr().err == f"error: stopped by Ctrl-C\nhint: {STOPPED_HINTS['check']}\n"


def test_a_signal_that_comes_twice_at_once_interrupts_once() -> None:
    done = run_stand_in("twice")
    assert (done.returncode, done.stderr.startswith("cleaned\n")) == (8, True), done


def test_of_signals_that_keep_coming_one_counts_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([100.0, 100.7, 101.4, 102.1, 102.8])
    monkeypatch.setattr(cutline.cli.main, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert [cutline.cli.main._is_repeated() for _ in range(5)] == [False, True, False, True, False]


def test_a_result_is_lines_or_one_document_and_progress_is_on_stderr() -> None:
    done = run_stand_in("fine")
    assert done.returncode == 4
    assert done.stdout == "it was fine [here]\n"
    assert done.stderr.startswith("nearly there\ncount: 2 rows, 0.")
    done = run_stand_in("fine", "--json")
    assert read_document(done) == {"schema": "cutline/stand-in/1", "how": "fine", "warnings": []}
    assert "nearly there" in done.stderr


def test_quiet_shows_only_warnings_of_a_success_and_the_result_of_anything_else() -> None:
    done = run_stand_in("done", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "warning: nearly there\n")
    done = run_stand_in("fine", "--quiet")
    assert done.stdout == "it was fine [here]\n"
    assert done.stderr == "warning: nearly there\n"
    done = run_stand_in("fine", "--quiet", "--json")
    assert read_document(done)["how"] == "fine"
    assert json.loads(done.stderr) == {"schema": "cutline/progress/1", "note": "nearly there"}


def test_a_closed_pipe_does_not_change_the_exit_code() -> None:
    line = f"{sys.executable} -c '{STAND_IN}' stand-in fine --quiet | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (4, "warning: nearly there\n")


def run_in_shell(words: str, redirections: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -c '{STAND_IN}' stand-in {words} {redirections}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("redirections", ["2>/dev/full", "2>&-", "0<&-", "0<&- 2>&-", "2>/dev/full 3>/dev/full"])
@pytest.mark.parametrize("words", ["done", "done --quiet", "done --json", "done --verbose"])
def test_what_stderr_can_not_take_ends_nothing(words: str, redirections: str) -> None:
    done = run_in_shell(words, redirections)
    is_shown = "it was done" in done.stdout or '"how": "done"' in done.stdout
    assert (done.returncode, is_shown) == (0, "--quiet" not in words), done


@pytest.mark.parametrize(
    ("redirections", "why"), [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")]
)
@pytest.mark.parametrize("words", ["", "--verbose", "--json"])
def test_a_result_that_stdout_can_not_take_has_an_exit_code_of_its_own(words: str, redirections: str, why: str) -> None:
    done = run_in_shell(f"done {words}", redirections)
    assert done.returncode == 11
    assert done.stderr.endswith(
        f"error: the command has ended, but its result could not be written to stdout: {why}\n"
    ), done.stderr
    assert "Traceback" not in done.stderr
    # What the work itself says is not covered up.
    assert run_in_shell(f"fine {words}", redirections).returncode == 4


def test_an_error_that_stdout_can_not_take_is_on_stderr() -> None:
    done = run_in_shell("busy --json", ">/dev/full")
    assert (done.returncode, done.stderr.splitlines()[:2]) == (7, ["error: a is busy", "hint: wait"])


@pytest.mark.parametrize("words", ["--help", "--version", "create --help"])
def test_help_that_can_not_be_written_is_no_bug(words: str) -> None:
    line = f"{sys.executable} -c 'from cutline.cli.main import main; main()' {words}"
    for redirections, code in ((">/dev/full", 11), ("| true", 0)):
        shell = ["bash", "-c", f"set -o pipefail; {line} {redirections}"]
        assert subprocess.run(shell, capture_output=True, timeout=60, check=False).returncode == code


def test_no_other_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Whatever writes to stderr would write into that file."""
    program = "import os; from cutline.cli.process.streams import secure_streams; secure_streams()\n"
    program += f"handle = os.open('{tmp_path}/file', os.O_WRONLY | os.O_CREAT); print(handle, flush=True)"
    for closed in ("2>&-", "0<&-", "0<&- 2>&-"):
        shell = ["bash", "-c", f'{sys.executable} -c "{program}" {closed}']
        assert int(subprocess.run(shell, stdout=subprocess.PIPE, timeout=60, check=True).stdout) > 2


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (["check", "x", "--json"], ["--json", "check", "x"]),
        (["--quiet", "check", "--fleet", "f", "x"], ["--quiet", "--fleet", "f", "check", "x"]),
        (["check", "--fleet=f", "--verbose"], ["--fleet=f", "--verbose", "check"]),
        (["check", "--", "--json", "--fleet"], ["check", "--", "--json", "--fleet"]),
        (["create", "x", "--comment=--json"], ["create", "x", "--comment=--json"]),
    ],
)
def test_shared_options_may_stand_before_or_after_the_command(given: list[str], parsed: list[str]) -> None:
    assert hoist_shared_options(given) == parsed


def test_the_fleet_option_without_a_file_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a file"):
        hoist_shared_options(["check", "--fleet"])
