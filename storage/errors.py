"""The base class of every error that a person or a script can act on.

A subclass is one situation: its message says what happened and where, its hint says what to do next, and its exit code
is what cron sees. It is defined in the lowest package, so that every other one can raise it.
"""

from __future__ import annotations

import re
from typing import TypedDict

# All loaded error classes by name; tests/test_tidy.py checks that names are unique.
ERRORS: dict[str, type[SnapshotError]] = {}


class SnapshotError(Exception):
    """What happened, what to do next, and the command's exit code.

    `message` is lower case and names node, group or object; `hint` is an action; `details` are values for `--json`
    (never a secret, never a DSN). `slug` is the stable name of the situation for scripts, derived from the class name:
    BaselineChangedError is "baseline-changed".
    """

    exit_code: int = 70

    def __init_subclass__(cls, **settings: object) -> None:
        super().__init_subclass__(**settings)
        ERRORS[cls.__name__] = cls

    def __init__(self, message: str, *, hint: str = "", details: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details or {}

    @property
    def slug(self) -> str:
        """The stable, hyphenated name of this situation."""
        words = re.findall(r"[A-Z][a-z0-9]*", type(self).__name__.removesuffix("Error"))
        return "-".join(word.lower() for word in words)


class UsageError(SnapshotError):
    """The arguments or fleet.toml are wrong; nothing was contacted."""

    exit_code = 2


class RefusedError(SnapshotError):
    """A precondition does not hold, and nothing was changed."""

    exit_code = 3


class IndeterminateError(SnapshotError):
    """It is not known whether a commit was stored; the next create, delete, prune or gc settles it."""

    exit_code = 5


class UnreachableError(SnapshotError):
    """A node or the store can't be reached."""

    exit_code = 6


class BusyError(SnapshotError):
    """Another operation is running on the fleet."""

    exit_code = 7


class ErrorReport(TypedDict):
    """An error as plain values: an exception raised in another process would arrive without its class."""

    error: str
    message: str
    hint: str
    details: dict[str, object]
    exit_code: int
    slug: str


class ReportedError(SnapshotError):
    """An error whose class this process has not loaded; it keeps that class's exit code and slug."""

    _slug: str = "reported"

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report["message"], hint=report["hint"], details=report["details"])
        self.exit_code = int(report["exit_code"])
        self._slug = str(report["slug"])

    @property
    def slug(self) -> str:
        """The slug of the error that was reported."""
        return self._slug


def report_of(error: SnapshotError) -> ErrorReport:
    """`error` as values that JSON can represent; `error_of` is the inverse."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
        "exit_code": error.exit_code,
        "slug": error.slug,
    }


def error_of(report: ErrorReport) -> SnapshotError:
    """The error that was passed to `report_of`, of the same class if that is loaded, else a ReportedError."""
    kind = SnapshotError if report["error"] == SnapshotError.__name__ else ERRORS.get(report["error"])
    if kind is None or issubclass(kind, ReportedError):
        return ReportedError(report)
    error = kind.__new__(kind)
    SnapshotError.__init__(error, report["message"], hint=report["hint"], details=report["details"])
    return error
