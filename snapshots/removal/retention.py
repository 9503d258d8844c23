"""Retention: which snapshots the rules keep. Pure values, so that every rule can be tested alone.

A snapshot is kept if any rule keeps it, or if no rule applies to whole snapshots. Its increments are kept if any rule
keeps them. A damaged snapshot is always kept and not counted by the rules, because its content is unknown. The newest
restorable snapshot is kept even if no rule keeps it. A restore point (`--only-cut`) is no full snapshot: keep_full
neither counts nor removes it, only keep_days does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from fleet.config import Retention
from storage.errors import UsageError


class NoRetentionError(UsageError):
    """No retention rule is set."""


class RetentionFate(StrEnum):
    """What happens to a snapshot: it is kept, reduced to its full snapshot, or deleted."""

    KEEP = "keep"
    ONLY_FULL = "only-full"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot as the rules see it. `points`: when the cuts of the full snapshot and each increment were made.

    `is_only_cut`: it is a restore point, which has no rows.
    """

    name: str
    points: tuple[datetime, ...]
    is_whole: bool = True
    is_only_cut: bool = False


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """What happens to a snapshot, and why: the rules that keep it, or that none does."""

    name: str
    fate: RetentionFate
    why: tuple[str, ...]


def check_rules(rules: Retention) -> None:
    """Raise NoRetentionError unless at least one rule is set."""
    if (rules.keep_full, rules.keep_days, rules.keep_increments) == (None, None, None):
        raise NoRetentionError(
            "no retention rule says which snapshots to keep",
            hint="give one: snapshot prune --keep-full N   or set keep_full, keep_days or keep_increments under"
            " [retention] in fleet.toml",
        )


def apply_retention(
    held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool = False
) -> list[RetentionVerdict]:
    """Judge each snapshot, newest first. `takes_last`: even the last restorable snapshot may be deleted."""
    newest_first = sorted(held, key=lambda one: (one.points[0] if one.points else now, one.name), reverse=True)
    whole = [one for one in newest_first if one.is_whole and not one.is_only_cut]
    reasons = {one.name: _keeping_rule(number, one, rules, now) for number, one in enumerate(whole)}
    reasons |= {one.name: _keeping_days(one, rules, now) for one in newest_first if one.is_only_cut}
    if whole and not takes_last and not any(reasons[one.name] for one in whole):
        reasons[whole[0].name] = ("it is the last snapshot that can be restored",)
    verdicts: list[RetentionVerdict] = []
    for one in newest_first:
        if not one.is_whole:
            verdicts.append(
                RetentionVerdict(one.name, RetentionFate.KEEP, ("it is damaged, so it is unknown what would be lost",))
            )
        elif one.is_only_cut and (why := reasons[one.name]):
            verdicts.append(RetentionVerdict(one.name, RetentionFate.KEEP, why))
        elif why := reasons[one.name]:
            verdicts.append(_with_increments(whole.index(one), one, rules, now, why))
        else:
            verdicts.append(RetentionVerdict(one.name, RetentionFate.DELETE, ("no rule keeps it",)))
    return verdicts


def _keeping_rule(number: int, one: HeldSnapshot, rules: Retention, now: datetime) -> tuple[str, ...]:
    """The rules that keep the snapshot; `number` is its place from the newest, from 0 on."""
    if rules.keep_full is None and rules.keep_days is None:
        return ("no rule removes whole snapshots",)
    why: list[str] = []
    if rules.keep_full is not None and number < rules.keep_full:
        why.append(f"keep_full {rules.keep_full}: it is number {number + 1} from the newest")
    if _is_young(one, rules, now):
        why.append(f"keep_days {rules.keep_days}: its newest cut was made at {_moment(max(one.points))}")
    return tuple(why)


def _keeping_days(one: HeldSnapshot, rules: Retention, now: datetime) -> tuple[str, ...]:
    """The rule that keeps a restore point."""
    if rules.keep_days is None:
        return ("only keep_days removes restore points",)
    young = f"keep_days {rules.keep_days}: its cut was made at {_moment(max(one.points))}"
    return (young,) if _is_young(one, rules, now) else ()


def _with_increments(
    number: int, one: HeldSnapshot, rules: Retention, now: datetime, why: tuple[str, ...]
) -> RetentionVerdict:
    """The verdict on a snapshot that is kept: with its increments, or without."""
    keep = rules.keep_increments
    if len(one.points) == 1 or keep is None:
        return RetentionVerdict(one.name, RetentionFate.KEEP, why)
    if number < keep:
        reason = f"increments kept by keep_increments {keep}: number {number + 1} from the newest"
    elif number == 0:
        # keep_increments 0. The newest chain keeps its increments, because only that one is being continued.
        reason = "increments kept because the newest chain is being continued"
    elif _is_young(one, rules, now):
        reason = f"increments kept by keep_days {rules.keep_days}"
    else:
        return RetentionVerdict(
            one.name, RetentionFate.ONLY_FULL, (*why, f"increments removed: keep_increments {keep}")
        )
    return RetentionVerdict(one.name, RetentionFate.KEEP, (*why, reason))


def _is_young(one: HeldSnapshot, rules: Retention, now: datetime) -> bool:
    return rules.keep_days is not None and now - max(one.points) < timedelta(days=rules.keep_days)


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
