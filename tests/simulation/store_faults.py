"""What can happen at a call of a store, and who draws it."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import NamedTuple


class Fault(StrEnum):
    """What may happen to a call. A crash kills the process; an interrupt is Ctrl-C."""

    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    INTERRUPT_BEFORE = "interrupt before"
    INTERRUPT_AFTER = "interrupt after"
    UNREACHABLE = "unreachable"
    THROTTLED = "throttled"
    LOST_STORED = "answer lost, stored"
    LOST_NOT_STORED = "answer lost, not stored"
    LATE = "answer lost, stored later"
    LATE_CRASH = "crash, stored later"
    TAKEN_BY_ITSELF = "412 after its own retry"
    TRUNCATED = "truncated read"
    STALE = "stale listing"
    REORDERED = "reordered listing"
    REFUSED = "deletion refused"
    LOST_DELETED = "answer lost, deleted"


COMMON_FAULTS = (
    Fault.CRASH_BEFORE,
    Fault.CRASH_AFTER,
    Fault.INTERRUPT_BEFORE,
    Fault.INTERRUPT_AFTER,
    Fault.UNREACHABLE,
    Fault.THROTTLED,
)
CREATE_FAULTS = (
    *COMMON_FAULTS,
    Fault.LOST_STORED,
    Fault.LOST_NOT_STORED,
    Fault.LATE,
    Fault.LATE_CRASH,
    Fault.TAKEN_BY_ITSELF,
)
READ_FAULTS = (*COMMON_FAULTS, Fault.TRUNCATED)
LIST_FAULTS = (*COMMON_FAULTS, Fault.STALE, Fault.REORDERED)
DELETE_FAULTS = (*COMMON_FAULTS, Fault.REFUSED, Fault.LOST_DELETED)


class Call(NamedTuple):
    """One call of a process, and the faults that it can meet."""

    verb: str
    key: str
    possible: tuple[Fault, ...]


class FaultSource:
    """Decides which fault each call meets. This one causes none."""

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()

    def before(self, call: Call) -> None:
        """Run before every call; a simulation lets other processes run here, and ends a process that was killed."""

    def fault(self, call: Call) -> Fault | None:
        """The fault that the call meets, if any."""
        return None

    def below(self, size: int) -> int:
        """A number from 0 to below `size`: how long a truncated body is, how old a listing is."""
        return 0

    def exit_error(self, fault: Fault) -> BaseException:
        """The exception that a crash or an interrupt raises in the process."""
        return KeyboardInterrupt()

    def record(self, fault: Fault, call: Call) -> None:
        """Count a fault that a call met."""
        self.tally[fault] += 1
