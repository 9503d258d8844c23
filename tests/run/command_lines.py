"""The command lines that every user of the machine could have read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def recording(lines: set[bytes]) -> Iterator[None]:
    """Record the command lines of all processes that are seen during the block."""
    done_recording = threading.Event()

    def record() -> None:
        # pg_dump of a small database runs for some hundredths of a second.
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
    """The names of the programs that were seen, and of the main classes of Java."""
    words = (word for line in lines for word in line.split(b"\0"))
    return {word.decode(errors="replace").rsplit("/", 1)[-1].rsplit(".", 1)[-1] for word in words}
