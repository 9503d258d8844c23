"""Where output goes: results, and progress as bars or lines."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from rich.console import Console
from rich.table import Table

from cutline.check.report import CheckReport, Compared, Conflict, Skipped, SnapshotReport
from cutline.cli.output.arguments import CommandContext, command_context
from cutline.cli.output.displays import NODES_MAX, BarProgress, LineProgress
from cutline.cli.output.failure import CommandFailure, report
from cutline.cli.output.junit import junit_of
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.tables import printable, wrapped
from cutline.fleet.progress import News, Progress, Reading


def context_of(options: CommandContext | None) -> typer.Context:
    """A context whose root has `options`, as the entry point sets them."""
    root = SimpleNamespace(obj=options)
    return cast("typer.Context", SimpleNamespace(find_root=lambda: root))


def report_steps(steps: Progress) -> None:
    """Report one operation of two steps and a note."""
    steps.step("copy base", total=3000, unit="bytes")
    steps.advance(1000)
    steps.advance(2000)
    steps.note("node a waits for a lock")
    steps.reached("slot made", node="a")
    steps.step("write commit")
    steps.reached("commit stored")


def test_times_and_paths_have_their_json_form(capsys: pytest.CaptureFixture[str]) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    emit(context_of(CommandContext(json=True)), {"at": moment, "path": Path("/x"), "text": "é"}, ["unseen"])
    written = capsys.readouterr().out
    expected = {"at": "2026-01-02T03:04:05.000Z", "path": "/x", "text": "é", "warnings": []}
    assert json.loads(written) == expected
    assert written.isascii()


def test_a_hook_gets_the_result_with_the_warnings_that_stdout_has(capsys: pytest.CaptureFixture[str]) -> None:
    options = CommandContext(json=True, warnings=["about fleet.toml"])
    emit(context_of(options), {"snapshot": "daily", "warnings": ["its own"]})
    written = json.loads(capsys.readouterr().out)
    assert written["warnings"] == ["about fleet.toml", "its own"]
    assert options.results == [written]


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
def test_a_value_that_json_cannot_represent_is_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        emit(context_of(CommandContext(json=True)), {"value": value})


def test_a_table_in_a_pipe_is_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "object")
    table.add_row("a", "x" * 300)
    emit(context_of(CommandContext()), {}, [table])
    assert "x" * 300 in capsys.readouterr().out


def test_names_and_comments_are_not_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("comment")
    table.add_row("[bold]a row :smile:")
    emit(context_of(CommandContext()), {}, ["[bold]a line[/bold]", table])
    written = capsys.readouterr().out
    assert "[bold]a line[/bold]\n" in written
    assert "[bold]a row :smile:" in written


def test_a_command_invoked_directly_has_the_default_options() -> None:
    assert command_context(context_of(None)) == CommandContext()


def test_lines_report_each_step_once_it_is_over() -> None:
    stream = io.StringIO()
    with LineProgress(stream) as steps:
        report_steps(steps)
    lines = stream.getvalue().splitlines()
    assert lines == ["node a waits for a lock", "copy base: 2.9 KiB, 0.0 s", "write commit: 0.0 s"]


def test_verbose_lines_report_each_point_as_it_is_reached() -> None:
    stream = io.StringIO()
    with LineProgress(stream, verbose=True) as steps:
        report_steps(steps)
    assert [line for line in stream.getvalue().splitlines() if ", after " in line] == [
        "slot made on a, after 0.0 s",
        "commit stored, after 0.0 s",
    ]


@pytest.mark.parametrize("verbose", [True, False])
def test_bars_show_points_only_if_verbose(*, verbose: bool) -> None:
    stream = io.StringIO()
    with BarProgress(Console(file=stream, force_terminal=True, width=100), verbose=verbose) as steps:
        report_steps(steps)
    assert ("slot made on a" in stream.getvalue()) is verbose


def test_an_interrupted_step_is_reported_as_stopped() -> None:
    stream = io.StringIO()
    steps = LineProgress(stream).__enter__()
    steps.step("drain")
    steps.__exit__(KeyboardInterrupt, None, None)
    assert stream.getvalue() == "drain: 0.0 s (stopped)\n"


def test_bars_leave_a_line_for_every_step() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with BarProgress(console) as steps:
        report_steps(steps)
    written = cast("io.StringIO", console.file).getvalue()
    assert "copy base: 2.9 KiB" in written
    assert "write commit" in written
    assert "node a waits for a lock" in written


@pytest.mark.parametrize("shown", ["lines", "bars"])
def test_progress_may_be_reported_from_any_thread(shown: str) -> None:
    stream = io.StringIO()
    bars = BarProgress(Console(file=stream, force_terminal=True, width=100))
    with LineProgress(stream) if shown == "lines" else bars as steps:
        steps.step("hash", unit="rows")
        threads = [threading.Thread(target=steps.advance, args=(1,)) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "hash: 50 rows" in stream.getvalue()


def test_bars_count_the_time_down_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("cutline.cli.output.displays.time.monotonic", lambda: now[0])
    with BarProgress(Console(file=stream, force_terminal=True, width=160)) as steps:
        steps.step("start Spark")
        steps.tell(Reading(0, seconds_left=12.0))
        for now[0] in (105.0, 200.0):
            steps._bars.refresh()
        steps.tell(Reading(0, seconds_left=2.0, is_rough=True))
        steps._bars.refresh()
    drawn = stream.getvalue()
    assert re.search("start Spark +roughly 2.0 s left in all", drawn)
    # It is never said that nothing is left.
    assert [f"about {left} s left in all" in drawn for left in ("7.0", "3.0", "0.0")] == [True, True, False]


def test_bars_show_some_of_very_many_nodes() -> None:
    with BarProgress(Console(file=io.StringIO(), force_terminal=True, width=160)) as steps:
        steps.step("copy", total=3, unit="tasks")
        for number in range(1000):
            steps.tell(Reading(number, 1000, "bytes", f"s{number}"))
        steps.tell(Reading(7, 1000, "bytes", "s0"))
        assert len(steps._bars.tasks) == 1 + NODES_MAX
        assert steps._bars.tasks[1].completed == 7


def test_bars_show_every_node_and_how_long_the_whole_takes() -> None:
    stream = io.StringIO()
    with BarProgress(Console(file=stream, force_terminal=True, width=160)) as steps:
        steps.tell(Reading(1, 10, "rows", "s0", "op", 9.0))
        steps.step("load rows", total=3, unit="objects")
        steps.tell(Reading(2500, 10_000, "rows", "s1", "op", 12.0))
        steps.tell(Reading(2500, 10_000, "rows", "", "op", 12.0))
        steps.advance(1)
        steps._bars.refresh()
        drawn = stream.getvalue()
        steps.step("swap")
        steps._bars.refresh()
        later = stream.getvalue()[len(drawn) :].rpartition("swap")[2]
    assert re.search("load rows .* 1 of 3 objects, about 12.0 s left in all", drawn)
    assert "2,500 of 10,000 rows" in drawn
    assert ("s0" in drawn, "s1" in later) == (False, False)


@pytest.mark.parametrize("columns", [80, 50])
def test_the_time_left_is_on_the_line_of_its_step_in_a_narrow_terminal(columns: int) -> None:
    with BarProgress(Console(file=io.StringIO(), force_terminal=True, width=columns)) as steps:
        steps.step("load rows")
        steps.tell(Reading(385_637, 414_032, "rows", "s1", "op", 63.0, is_rough=True))
        still = Console(file=io.StringIO(), width=columns)
        with still.capture() as drawn:
            still.print(steps._bars.get_renderable())
    first, node = drawn.get().splitlines()
    assert re.search("load rows +roughly 1 min 03 s left in all +0.0 s", first)
    assert re.search("s1 .*385,637 of 414,032 rows +0.0 s", node)


def test_progress_before_the_first_step_is_no_error() -> None:
    stream = io.StringIO()
    with LineProgress(stream) as steps:
        steps.advance(1)
    assert stream.getvalue() == ""


def test_quiet_leaves_notes_that_want_action_and_a_pipe_gets_lines(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = context_of(CommandContext(quiet=True))
    with progress(quiet) as steps:
        report_steps(steps)
        steps.note(News("node a accepts writes again"))
    assert capsys.readouterr() == ("", "warning: node a waits for a lock\n")
    emit(quiet, {}, ["daily is committed", "warning: see to it"])
    assert capsys.readouterr() == ("", "warning: see to it\n")
    emit(quiet, {}, ["daily is restored", "warning: see to it"], code=10)
    assert capsys.readouterr() == ("daily is restored\nwarning: see to it\n", "")
    answer(quiet, {}, ["daily"])
    assert capsys.readouterr() == ("daily\n", "")
    with progress(context_of(CommandContext())) as steps:
        report_steps(steps)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "copy base: 2.9 KiB" in captured.err


WORDS = "node s2 retains 12 GiB of WAL for nightly, which no increment has continued; to end it: "
ENDS = "snapshot end nightly-2026-11-20"


def test_sentences_are_broken_between_words_on_a_terminal_and_never_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command stays on one line, so that it can be pasted; so does a line that is not a sentence, such as SQL."""
    monkeypatch.setenv("COLUMNS", "80")
    shown, context = [f"warning: {WORDS}{ENDS}", f"{WORDS}{ENDS}"], context_of(CommandContext())
    answer(context, {}, shown, wraps=True)
    assert capsys.readouterr().out.splitlines() == shown
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    warning = [
        "warning: node s2 retains 12 GiB of WAL for nightly, which no increment has",
        "    continued; to end it: snapshot end nightly-2026-11-20",
    ]
    answer(context, {}, shown)
    assert capsys.readouterr().out.splitlines() == [*warning, shown[1]]
    context.find_root().obj.warn(f"{WORDS}{ENDS}")
    assert capsys.readouterr().err.splitlines() == warning
    answer(context, {}, shown[1:], wraps=True)
    assert capsys.readouterr().out.splitlines() == [
        "node s2 retains 12 GiB of WAL for nightly, which no increment has continued; to",
        f"    end it: {ENDS}",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    answer(context, {}, shown[:1])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "    increment has continued; to end it:",
        f"    {ENDS}",
    ]


@pytest.mark.parametrize(("text", "lines"), [
    ("short: snapshot list", ["short: snapshot list"]),
    # The quoted name of the fleet file belongs to the command.
    ("a: snapshot --fleet 'a b' gc --yes; or b", ["a:", "    snapshot --fleet 'a b' gc --yes;", "    or b"]),
    ("it (snapshot gc) and more words", ["it (snapshot gc) and", "    more words"]),
    # A word that is longer than the line is broken by the terminal.
    (f"one {'x' * 30} two", ["one", f"    {'x' * 30}", "    two"]),
    ("  an indented line, as one of a list", ["  an indented line,", "    as one of a list"]),
])  # fmt: skip
def test_a_sentence_is_broken_between_words_and_around_its_commands(text: str, lines: list[str]) -> None:
    assert list(wrapped(text, 20)) == lines


HOSTILE = "a\x1b[2Jb\rc\x9bd\u202ee"
ESCAPED = "a\\x1b[2Jb\\rc\\x9bd\\u202ee"


def test_names_from_databases_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table("name")
    table.add_row(HOSTILE)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        emit(context_of(CommandContext()), {}, [HOSTILE, table])
        written = capsys.readouterr().out
        # rich itself drops some.
        assert written.count("a\\x1b[2Jb") == 2
        assert not {"\x1b[2J", "\r", "\x9b", "\u202e"} & {
            written[i : i + n] for i in range(len(written)) for n in (1, 4)
        }


# One of each kind that a terminal does not show: of the category Cf, a filler among letters, a mark, a selector, a tag.
INVISIBLE = "\u200b\u2060\ufeff\u00ad\u115f\u3164\u034f\u180b\ufe00\U000e0041\U000e0100"


@pytest.mark.parametrize("character", INVISIBLE + "\u200c\u200d\ufe0f")
def test_two_names_that_differ_in_an_invisible_character_do_not_look_the_same(character: str) -> None:
    escape = character.encode("unicode_escape").decode()
    for letter in "s\u00fc":
        assert printable(f"order{letter}{character}_old") == f"order{letter}{escape}_old"


# Persian needs the non-joiner, Hindi the joiner, emoji both the joiner and the selector.
@pytest.mark.parametrize(
    "name", ["\u0645\u06cc\u200c\u062e\u0648\u0631", "क्\u200dष", "👩\u200d💻", "❤\ufe0f\u200d🔥", "naïve", "a\u00a0b"]
)
def test_letters_and_emoji_keep_their_joiners(name: str) -> None:
    assert printable(name) == name


def test_notes_and_errors_have_no_control_characters_either(capsys: pytest.CaptureFixture[str]) -> None:
    stream, console = io.StringIO(), Console(file=io.StringIO(), width=200)
    for progress_ in (LineProgress(stream), BarProgress(console)):
        with progress_:
            progress_.note(f"{HOSTILE}\nerror: faked")
    for text in (stream.getvalue(), console.file.getvalue()):  # type: ignore[attr-defined]  # it is a StringIO
        assert f"{ESCAPED}\\nerror: faked" in text
    report(
        CommandFailure(3, "s", f"{HOSTILE}\nhint: faked", f"{HOSTILE}\n  GRANT"),
        ValueError(),
        json=False,
        verbose=False,
    )
    assert capsys.readouterr().err == f"error: {ESCAPED}\\nhint: faked\nhint:\n{ESCAPED}\n  GRANT\n"


def cases_of(report: SnapshotReport) -> tuple[dict[str, str], dict[str, str]]:
    """The counts of the one suite, and the outcome of each case by its name."""
    (suite,) = ElementTree.fromstring(junit_of(CheckReport((report,), 1.0)))
    outcomes = {str(case.get("name")): case[0].tag if len(case) else "passed" for case in suite}
    return {name: text for name, text in suite.attrib.items() if name != "name"}, outcomes


def test_a_junit_report_has_a_passed_case_for_each_shard() -> None:
    """Also if there is nothing to compare them with, so that a report on shards with one copy is not empty."""
    one_copy = Skipped("rows of shard s1", "no backup copy to compare with", is_one_copy=True)
    report = SnapshotReport("nightly", 2, Compared(objects=5), skipped=[one_copy], shards={"s1": 1, "s2": 3})
    assert cases_of(report) == (
        {"tests": "3", "failures": "0", "skipped": "1"},
        {
            "rows of shard s1": "skipped",
            "shard s1: its only copy has the objects and rows of the commits": "passed",
            "shard s2: its 3 copies are equal": "passed",
        },
    )
    report.skipped.clear()
    counts, outcomes = cases_of(report)
    assert (counts["tests"], counts["skipped"], outcomes["everything compared"]) == ("3", "0", "passed")


@pytest.mark.parametrize("report", [
    SnapshotReport("nightly", 2, Compared(objects=5), conflicts=[Conflict("digest", "other bytes")]),
    SnapshotReport("nightly", 2, Compared(objects=5), skipped=[Skipped("contents", "only metadata was checked")]),
    SnapshotReport("nightly", 2),
])  # fmt: skip
def test_no_shard_passes_in_a_junit_report_on_an_incomplete_check(report: SnapshotReport) -> None:
    report.shards = {"s1": 1}
    counts, outcomes = cases_of(report)
    assert counts["tests"] == "1"
    assert "passed" not in outcomes.values()


def test_a_junit_report_has_no_control_characters() -> None:
    damaged = SnapshotReport("nightly", 0)
    damaged.conflicts.append(Conflict("rows", f"table {HOSTILE}"))
    written = junit_of(CheckReport((damaged,), 1.0))
    assert ESCAPED in written
    ElementTree.fromstring(written)
