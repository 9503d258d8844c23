"""The demo's live output on stderr: chapters, results, and a footer with the running step and the bank's rate.

The footer is drawn only on a terminal; elsewhere only chapters and results are written. Colour never carries
information alone.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections import deque
from itertools import pairwise
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cutline.cli.demo.figures import sparkline
from cutline.cli.output.bars import StepProgress
from cutline.cli.output.format import count_text, quantity_text, seconds_text
from cutline.embedded.bank_workload import BankWorkload
from cutline.fleet.progress import Reading

REFRESHES_PER_SECOND = 4
PULSE_SECONDS = 0.5
PULSE_POINTS = 24
TEXT_WIDTH_MAX = 100
INDENT = 4


class Screen:
    """The output of the story, and a Progress for its operations; writes nothing if `quiet`."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._began = time.monotonic()
        self._step: StepProgress | None = None
        self._bank: BankWorkload | None = None
        self._pulse: deque[tuple[float, int]] = deque(maxlen=PULSE_POINTS + 1)
        self._spinner = Spinner("dots")
        self._lock = Lock()
        self._live: Live | None = None
        if not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._live = Live(
                get_renderable=self._footer,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._step = self._bank = None
        if self._live:
            self._live.stop()

    def chapter(self, title: str, text: str) -> None:
        """Begin a chapter: write the time, the title, and what happens and why."""
        self._step = None
        when = f"{seconds_text(time.monotonic() - self._began):>8}"
        self._console.print()
        self._console.print(Text.assemble((when, "dim"), "  ", (title, "bold")))
        self._print("", text)

    def result(self, text: str) -> None:
        """Write a result."""
        self._print("✓ ", text, "green")

    def warning(self, text: str) -> None:
        """Write what is wrong or lost."""
        self._print("✗ ", text, "bold red")

    def watch(self, bank: BankWorkload | None) -> None:
        """Show this bank's rate in the footer; None stops that."""
        with self._lock:
            self._pulse.clear()
            self._bank = bank

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Show `name` in the footer as the running step."""
        self._step = StepProgress(name, total, unit)

    def advance(self, done: int) -> None:
        """Advance the running step."""
        with self._lock:
            if self._step is not None:
                self._step.done += done

    def tell(self, reading: Reading) -> None:
        """Ignore it: the footer has the step's own count."""

    def note(self, text: str) -> None:
        """Write a note."""
        self._print("! ", text, "yellow")

    def reached(self, point: str, *, node: str = "") -> None:
        """Ignore the point: the story has its own chapters."""

    def ending(self) -> None:
        """Ignore it: the demo's operations are its own."""

    def _print(self, sign: str, text: str, style: str = "") -> None:
        width = min(self._console.width, TEXT_WIDTH_MAX)
        margin = " " * (INDENT + len(sign))
        lines = textwrap.fill(text, width, initial_indent=margin, subsequent_indent=margin)
        self._console.print(Text.assemble((" " * INDENT + sign, style), lines[len(margin) :]))

    def _footer(self) -> Group:
        """The footer, redrawn several times a second."""
        lines = [line for line in (self._step_line(), self._bank_line()) if line is not None]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _step_line(self) -> Text | None:
        step = self._step
        if step is None:
            return None
        sign = self._spinner.render(self._console.get_time())
        amount = f"{count_text(step.done)} of {quantity_text(step.total, step.unit)}" if step.total else ""
        return Text.assemble("  ", str(sign), f" {step.name}  {amount}  ", (seconds_text(step.seconds), "dim"))

    def _bank_line(self) -> Text | None:
        with self._lock:
            bank = self._bank
            if bank is None:
                return None
            now, total = time.monotonic(), bank.committed.total
            if not self._pulse or now - self._pulse[-1][0] >= PULSE_SECONDS:
                self._pulse.append((now, total))
            points = list(self._pulse)
        rates = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairwise(points)]
        now_text = f"{count_text(round(rates[-1]))} a second, " if rates else ""
        pulse = f"{sparkline(rates):>{PULSE_POINTS}}"
        return Text.assemble("    the bank ", (pulse, "cyan"), f" {now_text}{count_text(total)} transfers")
