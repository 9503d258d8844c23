"""Records that several threads read at once, each kind for the first time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# msgspec examines a type when it is first used; unguarded, one of these rounds ends the process by a signal.
PROGRAM = """
import sys, threading
import msgspec
from cutline.fleet.record import Record, from_json

sys.setswitchinterval(1e-6)
for _ in range(300):
    inner = msgspec.defstruct("Inner", [("x", int)], bases=(Record,), frozen=True)
    fields = [("a", inner), *((f"c{number}", "int", 0) for number in range(20))]
    kind = msgspec.defstruct("Kind", fields, bases=(Record,), frozen=True, module="builtins")
    barrier, found = threading.Barrier(8), []

    def read():
        barrier.wait()
        found.append(from_json(b'{"a": {"x": 1}}', kind))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for one in threads: one.start()
    for one in threads: one.join()
    assert [one.a.x for one in found] == [1] * 8
"""


def test_threads_may_read_a_kind_of_record_for_the_first_time_at_once() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
