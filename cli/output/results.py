"""The one place that writes to stdout, and the choice of how progress is shown.

With `--json` stdout is exactly one JSON document, a result or an error; without it, lines and tables for a
person. Progress, notes and errors for a person go to stderr. rich is imported only where it draws.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output.context import command_context
from cli.output.format import time_text
from fleet.progress import Progress, Silent

if TYPE_CHECKING:
    import typer
    from rich.console import RenderableType

# Where stdout is no terminal nothing is cut or wrapped: tables are read by grep and awk.
WIDTH_OF_A_PIPE = 1000


def emit(context: typer.Context, document: Mapping[str, object], lines: Iterable[str | RenderableType] = ()) -> None:
    """Write a command's result: `document` with `--json`, else `lines`.

    A text is written as it is, without markup; anything else is drawn by rich. Times in `document` become
    RFC 3339, paths their text; any other value that JSON has no form for raises TypeError. A reader who
    closed the pipe ends the output, never the command: the exit code still tells what was done.
    """
    try:
        if command_context(context).json:
            write_document(document)
        else:
            _write_lines(lines)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def show_preview(context: typer.Context, lines: Iterable[str | RenderableType]) -> None:
    """Write what a command is about to do; with `--json` nothing, as its one document comes at the end."""
    if not command_context(context).json:
        emit(context, {}, lines)


def write_document(document: Mapping[str, object]) -> None:
    """Write one JSON document as one line."""
    sys.stdout.write(json.dumps(document, default=_json_value, allow_nan=False) + "\n")


def discard_stdout() -> None:
    """Send the rest to nowhere, so that flushing it while the interpreter ends does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def progress(context: typer.Context) -> AbstractContextManager[Progress]:
    """Show an operation's steps on stderr: bars on a terminal, else a line per step, nothing if quiet.

    `--verbose` adds a line for every point that is reached.
    """
    options = command_context(context)
    if options.quiet:
        return nullcontext(Silent())
    from cli.output.bars import BarProgress, LineProgress

    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return BarProgress(verbose=options.verbose)
    return LineProgress(sys.stderr, verbose=options.verbose)


def _json_value(value: object) -> str:
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def _write_lines(lines: Iterable[str | RenderableType]) -> None:
    console = None
    for line in lines:
        if isinstance(line, str):
            sys.stdout.write(line + "\n")
            continue
        if console is None:
            from rich.console import Console

            console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE)
        console.print(line)
