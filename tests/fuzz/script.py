"""A case as a value and as an equivalent text: the statements for two shards, and the increments between them.

A case is everything that a run needs: it is printed when a run fails, and every file in cases/ is such a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

MARK = "--@ "
# Separates the three statements of a COPY: rows out, a statement between, the same rows in again.
THEN = "\n;;\n"


class Fate(StrEnum):
    """How a transaction ends. All but the first three and the last two are prepared on every shard that has a part."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"
    # Every statement by itself: for those that PostgreSQL does not accept in a transaction block.
    BARE = "bare"
    COMMIT_PREPARED = "commit prepared"
    ROLL_BACK_PREPARED = "roll back prepared"
    # Prepared over one increment or two, and then ended.
    HOLD_COMMIT = "hold commit"
    HOLD_LONG_COMMIT = "hold long commit"
    HOLD_ROLL_BACK = "hold roll back"
    # Prepared at the next increment, and ended before anything else is done.
    HALF = "half commit"
    NEVER = "never"
    # Not prepared: open in separate sessions over the next increment.
    OPEN_COMMIT = "open commit"
    OPEN_ROLL_BACK = "open roll back"


ONE_PHASE = frozenset({Fate.COMMIT, Fate.ROLL_BACK, Fate.BARE})
OPEN = frozenset({Fate.OPEN_COMMIT, Fate.OPEN_ROLL_BACK})


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement; if `is_undone`, a savepoint rolls it back."""

    sql: str
    is_undone: bool = False


@dataclass(frozen=True, slots=True)
class Transaction:
    """Statements by shard, in order. With `has_savepoints` a failed one is skipped; else it ends the transaction.

    `at`: the point of the create after this interval at which it runs (fleet.crash_points); without
    one it runs before that create.
    """

    fate: Fate
    parts: tuple[tuple[int, tuple[Statement, ...]], ...]
    has_savepoints: bool = True
    at: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A whole case: `setup`, and `intervals`: the first before the full snapshot, every other before an increment."""

    setup: tuple[tuple[tuple[int, ...], str], ...]
    intervals: tuple[tuple[Transaction, ...], ...]
    options: dict[str, str] = field(default_factory=dict)


def format_case(case: Case) -> str:
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


def parse_case(text: str) -> Case:
    """The case of a text that `format_case` wrote."""
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
