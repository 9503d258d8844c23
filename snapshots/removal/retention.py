"""Retention: decide which snapshots the rules keep. Works on plain values, so every rule can be tested in isolation.

A snapshot is kept if any rule keeps it, or if no rule applies to whole snapshots. Its increments are kept if any rule
keeps them. If no rule keeps the increments of a chain, the chain ends and nodes keep no WAL for it, even if it has no
increments yet. A damaged snapshot is always kept, and the rules don't count it, because its contents are unknown. The
newest restorable snapshot is kept even if no rule keeps it. A restore point (`--only-cut`) is not a full snapshot:
keep_full neither counts nor removes it; only keep_days applies to it.

A snapshot in which a check found conflicts is judged by its own age and number like any other, but snapshots without
conflicts are numbered as if it did not exist. So the findings of checks never cause a deletion, even if somebody stores
a false record of a check. They only cause a few more snapshots to be kept (under keep_full N, at most N), and if all
snapshots have conflicts, old snapshots are removed as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from cutline.fleet.config import Retention
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CONFLICTS, PASSED
from cutline.storage.errors import UsageError

FOUND_IN_NEWER = "checks of newer snapshots found conflicts"


class NoRetentionError(UsageError):
    """No retention rule is set."""


class RetentionFate(StrEnum):
    """The fate of a snapshot: it is kept, reduced to its full snapshot (which ends its chain), or deleted."""

    KEEP = "keep"
    ONLY_FULL = "only-full"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot as input to the rules. `points` are the cut times of the full snapshot and of each increment.

    `is_only_cut` is set for a restore point, which has no rows. `checked` is the standing check. `is_continuable` is
    set if an increment can follow, so that nodes keep WAL.
    """

    name: str
    points: tuple[datetime, ...]
    is_whole: bool = True
    is_only_cut: bool = False
    checked: EndedCheck | None = None
    is_continuable: bool = False

    @property
    def is_restorable(self) -> bool:
        """Whether the rules for full snapshots apply: the snapshot has rows, and nothing is missing."""
        return self.is_whole and not self.is_only_cut

    @property
    def has_conflicts(self) -> bool:
        """Whether a check found conflicts, and no later check found everything valid."""
        return self.checked is not None and self.checked.point.result == CONFLICTS

    @property
    def is_valid(self) -> bool:
        """Whether a full check found everything valid, and no later check found conflicts."""
        return self.checked is not None and self.checked.point.result in PASSED


@dataclass(frozen=True, slots=True)
class RetentionVerdict:
    """The fate of a snapshot, and why: the rules that keep it, or the fact that none does."""

    name: str
    fate: RetentionFate
    why: tuple[str, ...]


def check_rules(rules: Retention) -> None:
    """Raise NoRetentionError unless at least one rule is set."""
    if (rules.keep_full, rules.keep_days, rules.keep_increments) == (None, None, None):
        raise NoRetentionError(
            "no retention rule is set, so prune can't tell which snapshots to keep",
            hint="pass a rule: snapshot prune --keep-full N   or set keep_full, keep_days or keep_increments under"
            " [retention] in fleet.toml",
        )


def apply_retention(
    held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool = False
) -> list[RetentionVerdict]:
    """Judge each snapshot, newest first. With `takes_last`, even the last restorable snapshot may be deleted."""
    newest_first = sorted(
        held, key=lambda snapshot: (snapshot.points[0] if snapshot.points else now, snapshot.name), reverse=True
    )
    places = _places(newest_first)
    reasons = {place.one.name: _keeping_rule(place, rules, now) for place in places}
    reasons |= {snapshot.name: _keeping_days(snapshot, rules, now) for snapshot in newest_first if snapshot.is_only_cut}
    proven = None if takes_last else _find_proven(places)
    if not takes_last:
        reasons |= _reasons_of_last(places, reasons)
        if proven and not reasons[proven.one.name]:
            reasons[proven.one.name] = (f"it is the newest snapshot found valid by a check, and {FOUND_IN_NEWER}",)
    by_name = {place.one.name: place for place in places}
    verdicts: list[RetentionVerdict] = []
    for snapshot in newest_first:
        if not snapshot.is_whole:
            verdicts.append(
                RetentionVerdict(
                    snapshot.name, RetentionFate.KEEP, ("it is damaged, so it is not known what would be lost",)
                )
            )
        elif snapshot.is_only_cut and (why := reasons[snapshot.name]):
            verdicts.append(RetentionVerdict(snapshot.name, RetentionFate.KEEP, why))
        elif why := reasons[snapshot.name]:
            place = by_name[snapshot.name]
            verdicts.append(_with_increments(place, rules, now, why, is_proven=place is proven))
        else:
            verdicts.append(RetentionVerdict(snapshot.name, RetentionFate.DELETE, ("no rule keeps it",)))
    return verdicts


def list_kept_instead(held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool) -> list[str]:
    """Return, newest first, the snapshots whose fate would be different if checks had found no conflicts."""
    verdicts = apply_retention(held, rules, now, takes_last=takes_last)
    unchecked = [replace(snapshot, checked=None) for snapshot in held]
    otherwise = {
        verdict.name: verdict.fate for verdict in apply_retention(unchecked, rules, now, takes_last=takes_last)
    }
    return [verdict.name for verdict in verdicts if verdict.fate is not otherwise[verdict.name]]


@dataclass(frozen=True, slots=True)
class _Place:
    """A restorable snapshot, and the number of newer snapshots that the rules count before it.

    For a snapshot with conflicts, all newer snapshots are counted, as if no check had found conflicts; otherwise only
    those without conflicts. `passed_over` is set if at least one newer snapshot is not counted.
    """

    one: HeldSnapshot
    number: int
    passed_over: bool

    @property
    def text(self) -> str:
        return f"number {self.number + 1} counting from the newest" + (" without conflicts" if self.passed_over else "")

    @property
    def note(self) -> tuple[str, ...]:
        """A note that the snapshot is not counted because of conflicts; empty if it has none."""
        if self.one.checked is None or not self.one.has_conflicts:
            return ()
        found_at = _moment(self.one.checked.moment.astimezone(UTC))
        see = f"see snapshot check {self.one.name}"
        return (f"it is not counted, because the check that ended at {found_at} UTC found conflicts: {see}",)


def _places(newest_first: Sequence[HeldSnapshot]) -> list[_Place]:
    """Return the positions of the restorable snapshots, newest first."""
    places: list[_Place] = []
    with_conflicts = 0
    for number, one in enumerate(snapshot for snapshot in newest_first if snapshot.is_restorable):
        if one.has_conflicts:
            places.append(_Place(one, number, passed_over=False))
            with_conflicts += 1
        else:
            places.append(_Place(one, number - with_conflicts, passed_over=with_conflicts > 0))
    return places


def _find_proven(places: Sequence[_Place]) -> _Place | None:
    """Return the newest snapshot that a check found valid, if checks of newer snapshots found conflicts.

    Newer snapshots that have not been checked yet don't replace it, because the next check may find conflicts in them
    too.
    """
    newest = next((place for place in places if place.one.is_valid), None)
    return newest if newest and newest.passed_over else None


def _reasons_of_last(places: Sequence[_Place], reasons: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return reasons to keep the newest restorable snapshot and the newest without conflicts if no rule keeps them."""
    found: dict[str, tuple[str, ...]] = {}
    without = [place for place in places if not place.one.has_conflicts]
    if without and not any(reasons[place.one.name] for place in without):
        what = "without conflicts" if without[0].passed_over else "that can be restored"
        found[without[0].one.name] = (f"it is the last snapshot {what}",)
    if places and not any(reasons[place.one.name] for place in places) and places[0].one.has_conflicts:
        found[places[0].one.name] = (f"it is the {'newest' if without else 'last'} snapshot that can be restored",)
    return found


def _keeping_rule(place: _Place, rules: Retention, now: datetime) -> tuple[str, ...]:
    if rules.keep_full is None and rules.keep_days is None:
        return ("no rule removes whole snapshots",)
    why: list[str] = []
    if rules.keep_full is not None and place.number < rules.keep_full:
        why.append(f"keep_full {rules.keep_full}: it is {place.text}")
    if _is_young(place.one, rules, now):
        why.append(f"keep_days {rules.keep_days}: its newest cut was made at {_moment(max(place.one.points))}")
    return tuple(why)


def _keeping_days(one: HeldSnapshot, rules: Retention, now: datetime) -> tuple[str, ...]:
    if rules.keep_days is None:
        return ("only keep_days removes restore points",)
    young = f"keep_days {rules.keep_days}: its cut was made at {_moment(max(one.points))}"
    return (young,) if _is_young(one, rules, now) else ()


def _with_increments(
    place: _Place, rules: Retention, now: datetime, why: tuple[str, ...], *, is_proven: bool
) -> RetentionVerdict:
    """Return the verdict on a snapshot that is kept, with or without its increments."""
    keep, one = rules.keep_increments, place.one
    has_increments = len(one.points) > 1
    if keep is None or not (has_increments or one.is_continuable):
        return RetentionVerdict(one.name, RetentionFate.KEEP, (*why, *place.note))
    if place.number < keep:
        reason = f"increments kept by keep_increments {keep}: {place.text}"
    elif place.number == 0 and not place.passed_over:
        # With keep_increments 0, only the newest chain keeps its increments, because it is being continued.
        reason = "increments kept because the newest chain is being continued"
    elif is_proven or place.number == 0:
        reason = f"increments kept because {FOUND_IN_NEWER}"
    elif _is_young(one, rules, now):
        reason = f"increments kept by keep_days {rules.keep_days}"
    else:
        removed = f"{'increments removed' if has_increments else 'no increments follow'}: keep_increments {keep}"
        return RetentionVerdict(one.name, RetentionFate.ONLY_FULL, (*why, removed, *place.note))
    if not has_increments:
        return RetentionVerdict(one.name, RetentionFate.KEEP, (*why, *place.note))
    return RetentionVerdict(one.name, RetentionFate.KEEP, (*why, reason, *place.note))


def _is_young(one: HeldSnapshot, rules: Retention, now: datetime) -> bool:
    return rules.keep_days is not None and now - max(one.points) < timedelta(days=rules.keep_days)


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
