"""Record the command lines that every user of the machine could read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def recording(lines: set[bytes]) -> Iterator[None]:
    """Record the command lines of all processes that run during the block."""
    done_recording = threading.Event()

    def record() -> None:
        # pg_dump runs for only some hundredths of a second on a small database.
        while not done_recording.wait(0.02):
            for process in Path("/proc").iterdir():
                with suppress(OSError):
                    lines.add((process / "cmdline").read_bytes())

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield
    finally:
        done_recording.set()
        thread.join()


def seen_programs(lines: set[bytes]) -> set[str]:
    """Return the names of the recorded programs and of Java's main classes."""
    words = (word for line in lines for word in line.split(b"\0"))
    return {word.decode(errors="replace").rsplit("/", 1)[-1].rsplit(".", 1)[-1] for word in words}
