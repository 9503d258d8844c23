"""Progress displays: bars on a terminal, lines for logs, JSON lines for programs.

All implement fleet.progress.Progress, write only to stderr and may be called from any thread. If the operation raises,
its last step is shown as stopped, never as done. `verbose` also shows each point when it is reached, with the time
since the start.

JSON output has one line when a step begins, then at most one per second for the whole step and for each node, and one
when the step ends. Logs contain only the last of these lines.
"""

from __future__ import annotations

import json
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

from msgspec import Struct, field
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from cutline.cli.output.arguments import PROGRESS_SCHEMA
from cutline.cli.output.tables import printable, quantity_text, seconds_text, time_text
from cutline.fleet.progress import COUNTED_DOWN, Reading, Silent, StepPace
from cutline.storage.clock import utc_now

# Nobody reads more bars than this, and drawing them takes time. `status` shows the nodes that are furthest behind.
NODES_MAX = 20


class StepProgress(Struct):
    """The step in progress; `began_seconds` is on the monotonic clock."""

    name: str
    total: int | None
    unit: str
    done: int = 0
    began_seconds: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """The time since the step began."""
        return time.monotonic() - self.began_seconds

    def summary(self) -> str:
        """`name: 1,200 rows, 0.4 s`."""
        amount = f"{quantity_text(self.done, self.unit)}, " if self.done else ""
        return f"{self.name}: {amount}{seconds_text(self.seconds)}"


class PointLines(Struct, frozen=True):
    """Lines about the points reached, shown if `wanted`; `began_seconds` is on the monotonic clock."""

    wanted: bool
    began_seconds: float = field(default_factory=time.monotonic)

    def line(self, point: str, node: str) -> str:
        """`slot made on a, after 0.4 s`."""
        where = f" on {node}" if node else ""
        return f"{point}{where}, after {seconds_text(time.monotonic() - self.began_seconds)}"


class LineProgress(Silent):
    """Writes one line per step when the step ends, for logs and mail from cron."""

    def __init__(self, stream: TextIO, *, verbose: bool = False) -> None:
        self._stream = stream
        self._points = PointLines(verbose)
        self._step: StepProgress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._end(stopped=error is not None)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._end(stopped=False)
            self._step = StepProgress(name, total, unit)

    def advance(self, done: int) -> None:
        with self._lock:
            if self._step is not None:
                self._step.done += done

    def note(self, text: str) -> None:
        with self._lock:
            self._write(text)

    def reached(self, point: str, *, node: str = "") -> None:
        if self._points.wanted:
            with self._lock:
                self._write(self._points.line(point, node))

    def _end(self, *, stopped: bool) -> None:
        if self._step is not None:
            self._write(self._step.summary() + (" (stopped)" if stopped else ""))
        self._step = None

    def _write(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


# A narrower terminal has no place for bars beside names and amounts.
BAR_COLUMNS_MIN = 60


class BarProgress(Silent):
    """Draws the current step at the bottom of the terminal; finished steps stay above it as lines."""

    def __init__(self, console: Console | None = None, *, verbose: bool = False) -> None:
        self._console = console or Console(stderr=True)
        self._points = PointLines(verbose)
        has_bars = self._console.width >= BAR_COLUMNS_MIN
        self._bars = RichProgress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description}", markup=False),
            *([_KnownTotalBar()] if has_bars else []),
            _Amount(table_column=Column(no_wrap=has_bars)),
            _Seconds(),
            console=self._console,
            transient=True,
        )
        self._step: StepProgress | None = None
        self._nodes: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._end(stopped=error is not None)
        self._bars.stop()

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._end(stopped=False)
            self._step = StepProgress(name, total, unit)
            self._bars.add_task(name, total=total, unit=unit)

    def advance(self, done: int) -> None:
        with self._lock:
            if self._step is not None:
                self._step.done += done
                self._bars.advance(self._bars.task_ids[0], done)

    def tell(self, reading: Reading) -> None:
        with self._lock:
            if self._step is None:
                return
            if reading.seconds_left is not None:
                left, now = reading.seconds_left, time.monotonic()
                self._bars.update(self._bars.task_ids[0], left=left, is_rough=reading.is_rough, told=now)
            if not reading.node:
                return
            if reading.node not in self._nodes:
                if len(self._nodes) == NODES_MAX:
                    return
                name = f"  {printable(reading.node)}"
                self._nodes[reading.node] = self._bars.add_task(name, total=reading.total, unit=reading.unit)
            self._bars.update(self._nodes[reading.node], completed=reading.done, total=reading.total)

    def note(self, text: str) -> None:
        with self._lock:
            self._console.print(Text(f"  {printable(text)}", style="yellow"))

    def reached(self, point: str, *, node: str = "") -> None:
        if self._points.wanted:
            with self._lock:
                self._console.print(Text(f"  {self._points.line(point, node)}", style="dim"))

    def _end(self, *, stopped: bool) -> None:
        if self._step is None:
            return
        sign, style = ("✗", "red") if stopped else ("✓", "green")
        self._console.print(Text.assemble((f"{sign} ", style), self._step.summary()))
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._nodes.clear()
        self._step = None


class _KnownTotalBar(BarColumn):
    """A bar if the total is known, otherwise nothing: a moving bar would suggest that the total is known."""

    def render(self, task: Task) -> Text:  # type: ignore[override]  # BarColumn promises its own bar, but any renderable works
        return Text("") if task.total is None else super().render(task)  # type: ignore[return-value]


class _Amount(ProgressColumn):
    """`1.2 MiB of 3.0 MiB`, `1,200 rows`, or nothing before the first unit; and the time left for the operation.

    The time left is counted down between readings. Beside the step's name, it would be broken on narrow terminals.
    """

    def render(self, task: Task) -> Text:
        amount, left = self._amount(task), task.fields.get("left")
        if left is None:
            return Text(amount)
        seconds = max(left - (time.monotonic() - task.fields["told"]), COUNTED_DOWN * left)
        about = "roughly" if task.fields["is_rough"] else "about"
        return Text(", ".join(filter(None, [amount, f"{about} {seconds_text(seconds)} left in all"])))

    def _amount(self, task: Task) -> str:
        unit = str(task.fields["unit"])
        done = int(task.completed)
        if task.total is None:
            return quantity_text(done, unit) if done else ""
        without_unit = quantity_text(done, unit) if unit == "bytes" else quantity_text(done, "")
        return f"{without_unit} of {quantity_text(int(task.total), unit)}"


class _Seconds(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(seconds_text(task.elapsed or 0.0), style="dim")


LINE_SECONDS = 1.0


class _ShownStep(StepPace):
    """The current step; when each node was last shown; and the nodes whose newest reading has not been shown yet."""

    shown: dict[str, float] = field(default_factory=dict)
    pending: dict[str, None] = field(default_factory=dict)


class JsonProgress(Silent):
    """Writes one JSON object per line. Notes are separate lines; `verbose` adds the points reached."""

    def __init__(self, stream: TextIO, command: str, *, verbose: bool = False) -> None:
        self._stream, self._command, self._verbose = stream, command, verbose
        self._operation: str | None = None
        self._left: tuple[float, float] | None = None
        self._is_rough = False
        self._step: _ShownStep | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._end("stopped" if error else "done")

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            self._end("done")
            self._step = _ShownStep(name, total, unit, time.monotonic())
            self._show(self._step, "", "running")

    def advance(self, done: int) -> None:
        with self._lock:
            if self._step is not None:
                self._step.done += done
                self._show_sometimes(self._step, "")

    def tell(self, reading: Reading) -> None:
        with self._lock:
            self._operation = reading.operation or self._operation
            self._left = None if reading.seconds_left is None else (reading.seconds_left, time.monotonic())
            self._is_rough = reading.is_rough
            if self._step is not None:
                if reading.unit or reading.node:
                    self._step.take(reading)
                    self._step.pending[reading.node] = None
                self._show_sometimes(self._step, reading.node)

    def note(self, text: str) -> None:
        with self._lock:
            self._write({"note": text})

    def reached(self, point: str, *, node: str = "") -> None:
        if self._verbose:
            with self._lock:
                self._write({"point": point, "node": node or None})

    def _end(self, state: str) -> None:
        if self._step is not None:
            for node in (*(node for node in self._step.pending if node), ""):
                self._show(self._step, node, state)
        self._step = None

    def _show_sometimes(self, step: _ShownStep, node: str) -> None:
        if time.monotonic() - step.shown.get(node, 0.0) >= LINE_SECONDS:
            self._show(step, node, "running")

    def _show(self, step: _ShownStep, node: str, state: str) -> None:
        now = time.monotonic()
        step.shown[node] = now
        step.pending.pop(node, None)
        pace = step.pace(node, now)
        reading, rate, left = pace.reading, pace.rate, pace.seconds_left
        if state == "done" and left is not None:
            left = 0.0
        self._write(
            {
                "step": step.name,
                "state": state,
                "node": node or None,
                "done": reading.done,
                "total": reading.total,
                "unit": reading.unit or None,
                "rate": None if rate is None else round(rate, 3),
                "seconds": round(now - step.began, 3),
                "seconds_left": None if left is None else round(left, 3),
                "operation_seconds_left": self._seconds_left(now),
                "operation_seconds_left_is_rough": None if self._left is None else self._is_rough,
            }
        )

    def _seconds_left(self, now: float) -> float | None:
        if self._left is None:
            return None
        left, at = self._left
        return round(max(left - (now - at), 0.0), 3)

    def _write(self, values: dict[str, Any]) -> None:
        head = {"schema": PROGRESS_SCHEMA, "command": self._command, "operation": self._operation}
        line = {**head, **values, "at": time_text(utc_now())}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()
