"""Progress as JSON lines on stderr, for programs: what `--json` shows while a command runs.

A step has a line when it begins, then at most one a second for the whole and for each node, and one when it ends.
Implements fleet.progress.Progress; may be called from any thread.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TextIO

from cutline.cli.output.context import PROGRESS_SCHEMA
from cutline.cli.output.format import time_text
from cutline.fleet.progress import Reading
from cutline.fleet.step_pace import StepPace
from cutline.storage.clock import utc_now

LINE_SECONDS = 1.0


@dataclass(slots=True)
class _ShownStep(StepPace):
    """The step in progress, and by node when it was shown last, and whose reading has no line yet."""

    shown: dict[str, float] = field(default_factory=dict)
    pending: dict[str, None] = field(default_factory=dict)


class JsonProgress:
    """Writes one JSON object per line. Notes are lines of their own; `verbose` adds the points that are reached."""

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
        """Write the last line of the previous step, and the first of `name`."""
        with self._lock:
            self._end("done")
            self._step = _ShownStep(name, total, unit, time.monotonic())
            self._show(self._step, "", "running")

    def advance(self, done: int) -> None:
        """Add to the step's own count."""
        with self._lock:
            if self._step is not None:
                self._step.done += done
                self._show_sometimes(self._step, "")

    def tell(self, reading: Reading) -> None:
        """Take the reading instead of the step's own count."""
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
        """Write the note at once."""
        with self._lock:
            self._write({"note": text})

    def reached(self, point: str, *, node: str = "") -> None:
        """Write the point at once, if points are wanted."""
        if self._verbose:
            with self._lock:
                self._write({"point": point, "node": node or None})

    def ending(self) -> None:
        """Ignore it: the steps say it."""

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
