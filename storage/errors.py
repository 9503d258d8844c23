"""The base class of every error that a person or a script can act on.

Each subclass is one situation: its message says what happened and where, its hint says what to do next, and its exit
code is what cron sees. The base class is defined in the lowest package, so that every other package can raise it.

Messages from libpq or a server may quote their input, so all secrets that this process knows are redacted from the text
of every error. This is the last line of defence: Cutline's own messages never contain a secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote

# All loaded error classes, keyed by name; tests/test_tidy.py checks that names are unique.
ERRORS: dict[str, type[SnapshotError]] = {}

# A shorter secret occurs inside many words, and is easily guessed anyway.
SECRET_CHARACTERS_MIN = 6
HIDDEN = "***"
# A server's message or a name in the store may be of any length.
TEXT_SHOWN_MAX = 20_000
WORD_OR_NUMBER = re.compile(r"[^\W\d]+|\d+")

_secrets: set[str] = set()


class ChainEnd(StrEnum):
    """Whether an error in an increment ends the chain, in which case `watch` starts a new chain with a full snapshot.

    PERHAPS: the chain may still be repaired, so `watch` goes on trying for an hour first.
    """

    NO = "no"
    PERHAPS = "perhaps"
    FOR_GOOD = "for good"


class SnapshotError(Exception):
    """The situation, the next action, and the command's exit code.

    `message` is lowercase and names node, group or object; `hint` is an action, or several lines with statements;
    `details` are values for `--json` (never a secret, never a DSN). A line break within a line of the hint is escaped:
    otherwise the owner of a table could inject a hint through its name. `slug` is the stable name of the situation for
    scripts, derived from the class name: BaselineChangedError is "baseline-changed". `ends_chain` says whether the hint
    tells the user that the chain has ended; tests/unit/test_chain_ends.py compares the two.
    """

    exit_code: int = 70

    def __init_subclass__(cls, **settings: object) -> None:
        super().__init_subclass__(**settings)
        ERRORS[cls.__name__] = cls

    def __init__(
        self,
        message: str,
        *,
        hint: str | Sequence[str] = "",
        details: dict[str, object] | None = None,
        ends_chain: ChainEnd = ChainEnd.NO,
    ) -> None:
        self.message = _show(message)
        self.ends_chain = ends_chain
        lines = [hint] if isinstance(hint, str) else hint
        self.hint = "\n".join(_show(line).replace("\n", "\\n") for line in lines)
        self.details: dict[str, object] = _redact_all(details or {})
        super().__init__(self.message)

    @property
    def slug(self) -> str:
        """The stable, hyphenated name of this situation."""
        words = re.findall(r"[A-Z][a-z0-9]*", type(self).__name__.removesuffix("Error"))
        return "-".join(word.lower() for word in words)


class StoppedError(SnapshotError):
    """Ctrl-C or SIGTERM has stopped a command that must report its finished and unfinished work.

    It is raised from the interrupt, which determines the exit code. Its message continues the sentence that names the
    interrupt.
    """

    exit_code = 130


Behind = TypeVar("Behind", bound=BaseException)


def find_behind(error: BaseException, kind: type[Behind]) -> Behind | None:
    """Return the first error of type `kind` among `error` and its causes; cleaning up may have raised others."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, kind):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


class UsageError(SnapshotError):
    """The arguments or fleet.toml are wrong; nothing was contacted."""

    exit_code = 2


class RefusedError(SnapshotError):
    """A precondition is not met; nothing was changed."""

    exit_code = 3


class IndeterminateError(SnapshotError):
    """It is unknown whether a commit was stored; the next create, delete, prune or gc finds out."""

    exit_code = 5


class UnreachableError(SnapshotError):
    """A node or the store can't be reached."""

    exit_code = 6


# Codes of errors that prove nothing about an object: the store did not answer, or fleet.toml is wrong, or names a file
# that an executor lacks. Other tasks of a job would have the same problem.
NOT_OF_THE_OBJECT = (UnreachableError.exit_code, UsageError.exit_code)


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
    ends_chain: str


class ReportedError(SnapshotError):
    """An error whose class this process has not loaded; it keeps that class's exit code and slug."""

    _slug: str = "reported"

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report["message"], **_rest_of(report))
        self.exit_code = int(report["exit_code"])
        self._slug = str(report["slug"])

    @property
    def slug(self) -> str:
        """The slug of the error that was reported."""
        return self._slug


def report_of(error: SnapshotError) -> ErrorReport:
    """Return `error` as values that JSON can represent; `error_of` is the inverse."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "details": error.details,
        "exit_code": error.exit_code,
        "slug": error.slug,
        "ends_chain": error.ends_chain.value,
    }


def error_of(report: ErrorReport) -> SnapshotError:
    """Return the error that was passed to `report_of`: of the same class if it is loaded, else a ReportedError."""
    kind = SnapshotError if report["error"] == SnapshotError.__name__ else ERRORS.get(report["error"])
    if kind is None or issubclass(kind, ReportedError):
        return ReportedError(report)
    error = kind.__new__(kind)
    SnapshotError.__init__(error, report["message"], **_rest_of(report))
    return error


def _rest_of(report: ErrorReport) -> dict[str, Any]:
    hint, ends_chain = report["hint"].split("\n"), ChainEnd(report["ends_chain"])
    return {"hint": hint, "details": report["details"], "ends_chain": ends_chain}


def remember_secret(secret: str) -> None:
    """Make `redact` hide this text, and its spellings in URIs and connection strings."""
    escaped = secret.replace("\\", "\\\\").replace("'", "\\'")
    if len(secret) >= SECRET_CHARACTERS_MIN:
        _secrets.update({secret, escaped, quote(secret, safe=""), quote(secret)})


def redact(text: str) -> str:
    """Return the text with every known secret hidden."""
    for secret in sorted(_secrets, key=len, reverse=True):
        # A password may be an ordinary word or number, which also occurs inside longer words.
        if WORD_OR_NUMBER.fullmatch(secret):
            text = re.sub(rf"(?<!\w){secret}(?!\w)", HIDDEN, text)
        else:
            text = text.replace(secret, HIDDEN)
    return text


def _show(text: str) -> str:
    if len(text) <= TEXT_SHOWN_MAX:
        return redact(text)
    # Redact before cutting: a secret cut in two would not be recognized.
    return f"{redact(text[: 2 * TEXT_SHOWN_MAX])[:TEXT_SHOWN_MAX]}… ({len(text)} characters)"


def _redact_all(value: Any) -> Any:
    if isinstance(value, str):
        return _show(value)
    if isinstance(value, dict):
        return {key: _redact_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_redact_all, value)) if type(value) in (list, tuple) else value
    return value
