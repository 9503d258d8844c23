"""A case as a value, and as a text that says the same: what is done to two shards, and between what increments.

A case is everything that a run needs: it is printed where one fails, and a fixed test is such a text in cases/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

MARK = "--@ "
# Between the three statements of a COPY: out, something, and what came out in again.
THEN = "\n;;\n"


class Fate(StrEnum):
    """How a transaction ends. All but the first three and the last two are prepared on every shard that has a part."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"
    # Every statement for itself: for those that PostgreSQL takes in no transaction.
    BARE = "bare"
    COMMIT_PREPARED = "commit prepared"
    ROLL_BACK_PREPARED = "roll back prepared"
    # Open over one increment or two, and then one of both.
    HOLD_COMMIT = "hold commit"
    HOLD_LONG_COMMIT = "hold long commit"
    HOLD_ROLL_BACK = "hold roll back"
    # Open at the increment that comes, and ended before anything else is done.
    HALF = "half commit"
    NEVER = "never"
    # Not prepared, on sessions of its own, and open over the increment that comes.
    OPEN_COMMIT = "open commit"
    OPEN_ROLL_BACK = "open roll back"


ONE_PHASE = frozenset({Fate.COMMIT, Fate.ROLL_BACK, Fate.BARE})
OPEN = frozenset({Fate.OPEN_COMMIT, Fate.OPEN_ROLL_BACK})


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement; one that is `undone` is taken back by a savepoint."""

    sql: str
    is_undone: bool = False


@dataclass(frozen=True, slots=True)
class Transaction:
    """Statements by shard, in order. With `savepoints` what fails is passed over; else the transaction ends there.

    `at`: the point of the create after this interval at which it is run (snapshots.operations.crash_points); else it
    is run before.
    """

    fate: Fate
    parts: tuple[tuple[int, tuple[Statement, ...]], ...]
    has_savepoints: bool = True
    at: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A whole case; `setup` is before the full snapshot, and each of `intervals` before an increment."""

    setup: tuple[tuple[tuple[int, ...], str], ...]
    intervals: tuple[tuple[Transaction, ...], ...]
    options: dict[str, str] = field(default_factory=dict)


def written(case: Case) -> str:
    """The case as a text."""
    lines = [f"{MARK}option {name} = {value}" for name, value in sorted(case.options.items())]
    for shards, statement in case.setup:
        lines += [f"{MARK}setup {' '.join(map(str, shards))}", statement]
    for interval in case.intervals:
        lines.append(f"{MARK}interval")
        for transaction in interval:
            place = f", at {transaction.at}" if transaction.at else ""
            whole = "" if transaction.has_savepoints else ", whole"
            lines.append(f"{MARK}transaction {transaction.fate}{whole}{place}")
            for shard, statements in transaction.parts:
                lines.append(f"{MARK}shard {shard}")
                for one in statements:
                    lines += [f"{MARK}{'undone' if one.is_undone else 'statement'}", one.sql]
    return "\n".join(lines) + "\n"


def read(text: str) -> Case:
    """The case that `written` made the text of."""
    options: dict[str, str] = {}
    setup: list[tuple[tuple[int, ...], str]] = []
    intervals: list[list[Transaction]] = []
    for word, rest, body in _pieces(text):
        if word == "option":
            name, _, value = rest.partition(" = ")
            options[name] = value
        elif word == "setup":
            setup.append((tuple(map(int, rest.split())), body))
        elif word == "interval":
            intervals.append([])
        elif word == "transaction":
            head, _, at = rest.partition(", at ")
            fate = Fate(head.removesuffix(", whole"))
            intervals[-1].append(Transaction(fate, (), has_savepoints=not head.endswith(", whole"), at=at))
        else:
            last = intervals[-1][-1]
            parts = [*last.parts]
            if word == "shard":
                parts.append((int(rest), ()))
            elif word in ("statement", "undone"):
                shard, statements = parts[-1]
                parts[-1] = shard, (*statements, Statement(body, is_undone=word == "undone"))
            else:
                raise ValueError(f"{MARK}{word} is not known")
            intervals[-1][-1] = replace(last, parts=tuple(parts))
    return Case(tuple(setup), tuple(tuple(interval) for interval in intervals), options)


def _pieces(text: str) -> Iterator[tuple[str, str, str]]:
    """Every mark's word and rest, and the text up to the next mark. Text before the first is a comment."""
    for piece in f"\n{text}".split(f"\n{MARK}")[1:]:
        head, _, body = piece.partition("\n")
        word, _, rest = head.partition(" ")
        yield word, rest, body.removesuffix("\n") if word in ("setup", "statement", "undone") else ""
