"""Run a command as a process of its own, and measure its time, its processor time and its processes' peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.machine import PROCESSES, family

# Sampling takes about 10 ms. Peers are not sampled, so it must not show in the times.
SAMPLE_SECONDS, POLL_SECONDS = 0.5, 0.02
SECONDS_MAX = 3600.0
SHOWN_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Ran:
    """The time and memory that a command used.

    `cpu_seconds` includes its children's that it waited for. `peak_bytes` is the most memory by kind of process, of all
    processes of a kind together; shared memory counts in proportion (PSS). `messages` is its stderr.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: Mapping[str, int]
    output: str
    messages: str

    @property
    def steps(self) -> dict[str, float]:
        """The seconds of each step that a command with --json has reported on stderr."""
        steps: dict[str, float] = {}
        for line in self.messages.splitlines():
            with suppress(json.JSONDecodeError):
                report = json.loads(line)
                if report.get("state") == "done" and report.get("node") is None:
                    steps[report["step"]] = round(steps.get(report["step"], 0) + report["seconds"], 2)
        return steps


def run_measured(
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    sample: Callable[[int], None] = lambda _: None,
) -> Ran:
    """Run the command, and call `sample` with its process id every SAMPLE_SECONDS; raise RuntimeError if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began = time.perf_counter()
        process = subprocess.Popen(words, stdout=out, stderr=err, cwd=folder, env=os.environ | dict(environment))
        peaks, due = dict[str, int](), began
        try:
            while True:
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                if ended:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    break
                if (now := time.perf_counter()) >= due:
                    due = now + SAMPLE_SECONDS
                    sample(process.pid)
                    for kind, size in _memory(process.pid).items():
                        peaks[kind] = max(peaks.get(kind, 0), size)
                if now - began > SECONDS_MAX:
                    raise TimeoutError(f"{Path(words[0]).name} takes longer than {SECONDS_MAX:.0f} s")
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - began
        output, messages = _read(out), _read(err)
        if process.returncode:
            problem = (output + messages).strip()[-SHOWN_CHARACTERS:]
            raise RuntimeError(f"{Path(words[0]).name} exited with {process.returncode}: {problem}")
    return Ran(seconds, usage.ru_utime + usage.ru_stime, peaks, output, messages)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _memory(pid: int) -> dict[str, int]:
    """Return the memory of the process and its descendants in bytes, by kind: "driver", "JVM" or "workers"."""
    found: dict[str, int] = {}
    for one in family(pid):
        kind = "driver" if one == pid else "JVM" if _name(one) == "java" else "workers"
        found[kind] = found.get(kind, 0) + _proportional_bytes(one)
    return found


def _name(pid: int) -> str:
    try:
        return (PROCESSES / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _proportional_bytes(pid: int) -> int:
    try:
        lines = (PROCESSES / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
