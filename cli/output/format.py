"""Numbers and times for people, and times for `--json`.

Pure functions: the current time is an argument.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime

from cutline.fleet.sizes import size_text as size_text

# Characters that a terminal shows as nothing, beside those of the category Cf: fillers and selectors of variants
# (Unicode's property Default_Ignorable_Code_Point).
INVISIBLE = re.compile(r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Of the invisible characters, those that letters and emoji are written with: a joiner, its opposite, a look.
JOINERS = "\u200c\u200d\ufe0e\ufe0f"
# Whose letters a joiner, or its opposite, changes (The Unicode Standard, 23.2).
JOINING_SCRIPTS = (
    "ARABIC ", "BENGALI ", "DEVANAGARI ", "GUJARATI ", "GURMUKHI ", "KANNADA ", "KHMER ", "MALAYALAM ", "MONGOLIAN ",
    "MYANMAR ", "NKO ", "ORIYA ", "SINHALA ", "SYRIAC ", "TAMIL ", "TELUGU ", "TIBETAN ",
)  # fmt: skip
# A command in a text, and what precedes it: a line that begins with it is of a hint. `demo` has fleets of its own; help
# needs none.
LEADS = r": |; |\(| {3}|then |or |as "
COMMAND_NAMES = (
    "init", "create", "restore", "check", "resume", "list", "show", "watch", "status", "cancel", "wait", "history",
    "report", "delete", "prune", "gc", "key", "cluster",
)  # fmt: skip
# What follows `snapshot` may also be the name of a snapshot, such as watch-2026.
COMMAND = rf"snapshot (?!\S+ --help|\S+: )(?=(?:{'|'.join(COMMAND_NAMES)})(?![\w.-]))"
IN_LINE, IN_HINT = re.compile(rf"({LEADS}){COMMAND}"), re.compile(rf"(^|{LEADS}){COMMAND}", re.MULTILINE)
SECONDS_PER_MINUTE = 60
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86400


def count_text(count: int) -> str:
    """`1,234,567`."""
    return f"{count:,}"


def quantity_text(amount: int, unit: str) -> str:
    """`amount` in `unit`, a plural: a size for `bytes`, else a count with its unit, if it has one."""
    if unit == "bytes":
        return size_text(amount)
    return f"{count_text(amount)} {unit.removesuffix('s') if amount == 1 else unit}".rstrip()


def quantity_is(amount: int, unit: str) -> str:
    """`1 node is`, `3 nodes are`: the subject of a sentence, with its verb."""
    return f"{quantity_text(amount, unit)} {'is' if amount == 1 else 'are'}"


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `59.9 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`: two parts at most."""
    if round(seconds, 1) < SECONDS_PER_MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < SECONDS_PER_HOUR:
        return f"{whole // SECONDS_PER_MINUTE} min {whole % SECONDS_PER_MINUTE:02} s"
    if whole < SECONDS_PER_DAY:
        minutes = whole % SECONDS_PER_HOUR // SECONDS_PER_MINUTE
        return f"{whole // SECONDS_PER_HOUR} h {minutes:02} min"
    return f"{whole // SECONDS_PER_DAY} d {whole % SECONDS_PER_DAY // SECONDS_PER_HOUR:02} h"


def age_text(then: datetime, *, now: datetime) -> str:
    """How long ago `then` was, in its largest unit: `just now`, `5 min ago`, `3 h ago`, `12 d ago`.

    By another machine's clock it may be after `now`: `just now` within a minute, else `in the future`.
    """
    seconds = (now - then).total_seconds()
    if seconds <= -SECONDS_PER_MINUTE:
        return "in the future"
    if seconds < SECONDS_PER_MINUTE:
        return "just now"
    if seconds < SECONDS_PER_HOUR:
        return f"{int(seconds // SECONDS_PER_MINUTE)} min ago"
    if seconds < SECONDS_PER_DAY:
        return f"{int(seconds // SECONDS_PER_HOUR)} h ago"
    return f"{int(seconds // SECONDS_PER_DAY)} d ago"


def time_text(moment: datetime) -> str:
    """RFC 3339 in UTC with milliseconds, `2026-01-02T03:04:05.678Z`; raise ValueError for a time without a zone."""
    if moment.tzinfo is None:
        raise ValueError(f"the time {moment.isoformat()} has no zone")
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(moment: datetime) -> str:
    """A moment in UTC for people, to the second: `2026-01-02 03:04:05Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def minute_text(moment: datetime) -> str:
    """A moment in UTC for narrow terminals: `2026-01-02 03:04Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")


def name_fleet(text: str, fleet_file: str | None, *, is_hint: bool = False) -> str:
    """The text with the fleet file that was given in each of its commands: they can be typed as they are."""
    if not fleet_file:
        return text
    named = f"snapshot --fleet {shlex.quote(fleet_file)} "
    return (IN_HINT if is_hint else IN_LINE).sub(lambda found: found[1] + named, text)


def printable(text: str, *, keep: str = "") -> str:
    """The text with each control or invisible character, except those of `keep`, as its escape sequence in Python.

    Names, comments and messages come from databases, whose owners could otherwise move a terminal's cursor, hide text
    (also by marks that change its direction), begin lines of their own, or have two names look the same. Joiners stay
    in scripts that join letters, and in emoji.
    """
    if text.isprintable() and not INVISIBLE.search(text):
        return text
    pairs = zip(" " + text, text, strict=False)
    return "".join(one if one in keep or _is_visible(one, before) else _escape(one) for before, one in pairs)


def _is_visible(character: str, before: str) -> bool:
    if character in JOINERS:
        # Emoji are other symbols (So) or modifiers (Sk); a look may come before a joiner.
        is_symbol = unicodedata.category(before) in ("So", "Sk") or before in "\ufe0e\ufe0f"
        return is_symbol or unicodedata.name(before, "").startswith(JOINING_SCRIPTS)
    category = unicodedata.category(character)
    return category not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp") and not INVISIBLE.match(character)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def causes_lines(causes: Iterable[str]) -> list[str]:
    """Why each earlier attempt at a cut was inconsistent."""
    return [f"attempt {number} at the cut was inconsistent: {cause}" for number, cause in enumerate(causes, 1)]
