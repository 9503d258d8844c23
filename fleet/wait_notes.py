"""Notes about a wait: why an operation waits, first after two seconds, then whenever the cause changes."""

from __future__ import annotations

import time
from collections.abc import Hashable

from msgspec import Struct, field

from cutline.fleet.progress import News, Progress

# The first note is reported only after this time, so that short waits are not reported.
NOTE_SECONDS = 2.0
# As long as nothing changes, the note is repeated at this interval.
REPEAT_SECONDS = 30.0


class WaitNotes(Struct):
    """Reports that `what` is waiting: first after NOTE_SECONDS, then on every change and every REPEAT_SECONDS."""

    what: str
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    _reported: Hashable = None
    _reported_at: float = 0.0

    @property
    def waited_seconds(self) -> float:
        """How long the wait has lasted so far."""
        return time.monotonic() - self.began

    def report(self, key: Hashable, text: str) -> None:
        """Report that `what` is waiting, and why, if a note is due; a `key` other than the last note's makes it due."""
        now = time.monotonic()
        if now - self.began < NOTE_SECONDS or (key == self._reported and now - self._reported_at < REPEAT_SECONDS):
            return
        self._reported, self._reported_at = key, now
        self.progress.note(News(f"{self.what} waits for {text}"))
