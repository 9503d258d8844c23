"""Which snapshots the rules of retention keep: pure values, so that every rule can be tested alone.

A snapshot stays if any rule keeps it, or if no rule says anything of whole snapshots. Its increments stay if any rule
keeps those. One that is damaged stays whatever the rules say, and does not count for them: what is in it can't be told.
Of those that can be restored, the newest stays even where no rule keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from fleet.config import Retention
from storage.errors import UsageError


class NoRetentionError(UsageError):
    """Nothing says what is to be kept."""


class RetentionFate(StrEnum):
    """What becomes of a snapshot."""

    KEEP = "keep"
    ONLY_FULL = "only-full"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """What the rules look at. `points`: when the full snapshot and each increment were taken, in order."""

    name: str
    points: tuple[datetime, ...]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """What becomes of a snapshot, and why: every rule that keeps it, or that none does."""

    name: str
    fate: RetentionFate
    why: tuple[str, ...]


def check_rules(rules: Retention) -> None:
    """Raise NoRetentionError unless at least one rule is set."""
    if (rules.keep_full, rules.keep_days, rules.keep_increments) == (None, None, None):
        raise NoRetentionError(
            "nothing says which snapshots to keep",
            hint="name it: snapshot prune --keep-full N   or in fleet.toml under [retention]: keep_full, keep_days,"
            " keep_increments",
        )


def apply_retention(
    held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool = False
) -> list[RetentionVerdict]:
    """What becomes of each snapshot, the newest first; `takes_last`: also of the last one that can be restored."""
    newest_first = sorted(held, key=lambda one: (one.points[0] if one.points else now, one.name), reverse=True)
    whole = [one for one in newest_first if one.is_whole]
    reasons = {one.name: _keeping_rule(number, one, rules, now) for number, one in enumerate(whole)}
    if whole and not takes_last and not any(reasons.values()):
        reasons[whole[0].name] = ("it is the last one that can be restored",)
    verdicts: list[RetentionVerdict] = []
    for one in newest_first:
        if not one.is_whole:
            verdicts.append(
                RetentionVerdict(one.name, RetentionFate.KEEP, ("it is damaged, so what would be lost can't be told",))
            )
        elif why := reasons[one.name]:
            verdicts.append(_with_increments(whole.index(one), one, rules, now, why))
        else:
            verdicts.append(RetentionVerdict(one.name, RetentionFate.DELETE, ("no rule keeps it",)))
    return verdicts


def _keeping_rule(number: int, one: HeldSnapshot, rules: Retention, now: datetime) -> tuple[str, ...]:
    """The rules that keep the snapshot, the `number`th newest from 0 on."""
    if rules.keep_full is None and rules.keep_days is None:
        return ("no rule takes whole snapshots away",)
    why: list[str] = []
    if rules.keep_full is not None and number < rules.keep_full:
        why.append(f"keep_full {rules.keep_full}: it is number {number + 1}")
    if _is_young(one, rules, now):
        why.append(f"keep_days {rules.keep_days}: its newest restore point is of {_moment(max(one.points))}")
    return tuple(why)


def _with_increments(
    number: int, one: HeldSnapshot, rules: Retention, now: datetime, why: tuple[str, ...]
) -> RetentionVerdict:
    """The verdict on a snapshot that stays: with its increments, or without."""
    most = rules.keep_increments
    if len(one.points) == 1 or most is None:
        return RetentionVerdict(one.name, RetentionFate.KEEP, why)
    if number < most:
        return RetentionVerdict(
            one.name, RetentionFate.KEEP, (*why, f"increments by keep_increments {most}: it is number {number + 1}")
        )
    if number == 0:
        # keep_increments 0: nobody asks for the next increment of any other.
        return RetentionVerdict(
            one.name, RetentionFate.KEEP, (*why, "increments because it is the newest: it is being continued")
        )
    if _is_young(one, rules, now):
        return RetentionVerdict(one.name, RetentionFate.KEEP, (*why, f"increments by keep_days {rules.keep_days}"))
    return RetentionVerdict(one.name, RetentionFate.ONLY_FULL, (*why, f"increments by no rule: keep_increments {most}"))


def _is_young(one: HeldSnapshot, rules: Retention, now: datetime) -> bool:
    return rules.keep_days is not None and now - max(one.points) < timedelta(days=rules.keep_days)


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
