"""The only module that writes to stdout; it also selects the progress display.

With `--json`, stdout is exactly one JSON document, a result or an error; without it, stdout is lines and tables.
Progress, notes and human-readable errors go to stderr. rich is imported only where it draws.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from msgspec import Struct

from cutline.cli.output.arguments import CommandContext, command_context
from cutline.cli.output.displays import JsonProgress
from cutline.cli.output.tables import Enumeration, FittingTable, name_fleet, printable, sentence_lines, time_text
from cutline.fleet.progress import News, Progress, Silent
from cutline.storage.waits import listening

if TYPE_CHECKING:
    import typer
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

# In a pipe, nothing is truncated or wrapped, so that grep and awk can read the tables.
WIDTH_OF_A_PIPE = 1000


WARNING = "warning: "
# Lines about more conflicts are left out; JSON has all of them.
CONFLICTS_SHOWN_MAX = 20


def emit(
    context: typer.Context,
    document: Mapping[str, object],
    lines: Iterable[str | RenderableType] = (),
    *,
    code: int = 0,
) -> None:
    """Write the result of a command that does something, as `answer` does.

    With `--quiet`, a successful command prints nothing. A command succeeds if its exit code is 0; its warnings still go
    to stderr. With `--json`, the document is always written.
    """
    options = command_context(context)
    options.results.append(_with_warnings(options, document))
    if options.json or not options.quiet or code:
        answer(context, document, lines)
        return
    for line in lines:
        if isinstance(line, str) and line.startswith(WARNING):
            options.warn(name_fleet(line.removeprefix(WARNING), options.given_fleet))


def answer(
    context: typer.Context,
    document: Mapping[str, object],
    lines: Iterable[str | RenderableType] = (),
    *,
    wraps: bool = False,
) -> None:
    """Write the result of a command: `document` with `--json`, otherwise `lines`, even with `--quiet`.

    The document's `warnings` begin with those about fleet.toml, which stderr has already shown. On a terminal, warnings
    are broken between words, and with `wraps` all strings, because they are sentences. Other strings are written as
    they are, because SQL and commands are pasted; rich draws anything else. Times in `document` are written as RFC
    3339, and paths as text; any other value without a JSON form raises TypeError. A failed write is reported when the
    command ends (cli/process/streams.py).
    """
    options = command_context(context)
    if options.json:
        write_document(_with_warnings(options, document))
    else:
        _write_lines(_naming_fleet(lines, options.given_fleet), wraps=wraps)
    sys.stdout.flush()


def _with_warnings(options: CommandContext, document: Mapping[str, object]) -> dict[str, object]:
    """Return the document with its warnings last, which begin with those about fleet.toml."""
    own = document.get("warnings", ())
    return {**document, "warnings": [*options.warnings, *(own if isinstance(own, Iterable) else ())]}


def emit_items(
    context: typer.Context, document: Mapping[str, object], name: str, items: Iterable[Mapping[str, object]]
) -> None:
    """Write a JSON document like `emit`, with a last field `name` whose items are written one at a time."""
    head = json.dumps({**document, "warnings": command_context(context).warnings}, default=_json_value)
    sys.stdout.write(f"{head[:-1]}, {json.dumps(name)}: [")
    for number, item in enumerate(items):
        sys.stdout.write(", " * (number > 0) + json.dumps(item, default=_json_value, allow_nan=False))
    sys.stdout.write("]}\n")
    sys.stdout.flush()


def emit_csv(rows: Iterable[Iterable[object]]) -> None:
    """Write rows to stdout as CSV (RFC 4180); None is an empty cell."""
    import csv

    csv.writer(sys.stdout).writerows(rows)
    sys.stdout.flush()


def show_preview(context: typer.Context, lines: Iterable[str | RenderableType]) -> None:
    """Write the plan of a command, but not with `--quiet`, nor with `--json`, where the only document is the result."""
    options = command_context(context)
    if not (options.json or options.quiet):
        answer(context, {}, lines)


def write_document(document: Mapping[str, object], stream: TextIO | None = None) -> None:
    """Write a JSON document as one line, to stdout by default."""
    (stream or sys.stdout).write(json.dumps(document, default=_json_value, allow_nan=False) + "\n")


@contextmanager
def progress(context: typer.Context) -> Iterator[Progress]:
    """Show the progress of an operation and notices about its store on stderr."""
    quiet = command_context(context).quiet
    with _progress(context) as shown, listening(Silent().note if quiet else shown.note):
        yield shown


class _Notes(Silent):
    """Shows the part of an operation's progress that `--quiet` keeps: notes that need action, as warnings."""

    def __init__(self, options: CommandContext) -> None:
        self._options = options

    def note(self, text: str) -> None:
        if not isinstance(text, News):
            self._options.warn(text)


def _progress(context: typer.Context) -> AbstractContextManager[Progress]:
    """Show an operation's steps on stderr: as bars on a terminal, otherwise as one line per step.

    `--json` writes JSON lines (cli/output/displays.py); `--quiet` writes only warnings. `--verbose` adds each point
    reached.
    """
    options = command_context(context)
    if options.quiet:
        return nullcontext(_Notes(options))
    if options.json:
        return JsonProgress(sys.stderr, context.info_name or "", verbose=options.verbose)
    from cutline.cli.output.displays import BarProgress, LineProgress

    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return BarProgress(verbose=options.verbose)
    return LineProgress(sys.stderr, verbose=options.verbose)


@contextmanager
def drawn_live() -> Iterator[Callable[[Iterable[str | RenderableType]], None]]:
    """Yield a function that draws lines: on a terminal they replace the previous lines; elsewhere they are appended.

    They are also appended on a terminal that can't move its cursor (TERM=dumb), where rich would draw nothing.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty() or Console().is_dumb_terminal:
        yield _write_flushed
        return
    with Live(console=Console(markup=False, emoji=False), auto_refresh=False, screen=True) as live:

        def draw(lines: Iterable[str | RenderableType]) -> None:
            drawn = [Text(printable(line)) if isinstance(line, str) else _Printable(line) for line in lines]
            live.update(Group(*drawn), refresh=True)

        yield draw


def jsonable(document: Mapping[str, object]) -> object:
    """Return the document as values that JSON has."""
    return json.loads(json.dumps(document, default=_json_value, allow_nan=False))


def _json_value(value: object) -> str:
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


class _Printable(Struct, frozen=True):
    drawn: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.drawn, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text, keep="\n"))


def _naming_fleet(lines: Iterable[str | RenderableType], fleet_file: str | None) -> Iterator[str | RenderableType]:
    for line in lines:
        yield name_fleet(line, fleet_file) if isinstance(line, str) else line


def _write_flushed(lines: Iterable[str | RenderableType]) -> None:
    _write_lines(lines)
    # Whoever reads a pipe waits for each drawing.
    sys.stdout.flush()


def _write_lines(lines: Iterable[str | RenderableType], *, wraps: bool = False) -> None:
    console = None
    for line in lines:
        if isinstance(line, str):
            is_sentence = wraps or line.startswith(WARNING)
            written = sentence_lines(line, sys.stdout) if is_sentence else [printable(line)]
            sys.stdout.writelines(f"{text}\n" for text in written)
            continue
        if isinstance(line, FittingTable | Enumeration) and not sys.stdout.isatty():
            sys.stdout.writelines(f"{text}\n" for text in line.lines(None, sys.stdout.encoding))
            continue
        if console is None:
            from rich.console import Console

            # Names and comments are user input: with markup and emoji codes off, "[bold]" stays in them.
            width = None if sys.stdout.isatty() else WIDTH_OF_A_PIPE
            console = Console(width=width, markup=False, emoji=False)
        console.print(_Printable(line))
