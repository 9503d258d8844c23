"""Retention: decide which restore points the rules keep. Works on plain values, so every rule can be tested alone.

Each rule keeps restore points; what no rule keeps goes. So another rule, or a larger number, never deletes more. A
restore point needs its full snapshot and all increments before it, and a chain can only be kept up to its end, reduced
to its full snapshot, or deleted. So a rule that keeps an increment keeps the whole chain; if the rules keep only the
full snapshot, its increments are deleted, the chain ends, and nodes keep no WAL for it. This also ends a chain that has
no increments yet, unless `last` or `within` keeps it.

A merged chain can also begin at a merge: what lies before the newest merge that no wanted restore point precedes
is given up. A merge is as good as a full snapshot, so of each snapshot that `last N` keeps, it wants what follows the
Nth newest of the full snapshot and its merges. A merge never causes another snapshot to go. If a check found conflicts
in a snapshot, nothing of it is given up, because the merge has the conflicts, too.

Periods are those of UTC, and a restore point belongs to the period of its cut. Apart from `within`, no rule looks at
the present time: if no restore points are added, nothing is ever deleted.

Four snapshots stay with their newest increments, whatever the rules are, unless the caller allows to delete the last
one: the newest that can be restored, the one with the newest restore point, the newest without conflicts and, if a
newer one has conflicts, the newest that a check has found valid. A damaged snapshot is always kept, and the rules don't
count it, because its contents are unknown; neither do they count a snapshot with a cut in the future, because some
clock was wrong. A pinned restore point is kept, even if the caller allows to delete the last one.

A restore point without rows (`--only-cut`) is not a full snapshot: `last` and `only_full` neither count nor remove it.
The other rules apply to these restore points as a series of their own; if none is set, all of them are kept.

A snapshot in which a check found conflicts is judged among all snapshots, but the others are judged as if it did not
exist. So the findings of checks never cause a deletion, even if somebody stores a false record of a check: they only
cause a few more snapshots to be kept, and if all snapshots have conflicts, old snapshots are removed as usual.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.config import ALL, CALENDAR_RULES, TIME_RULES, KeepCount, Retention
from cutline.fleet.units import duration_text
from cutline.nodes.clocks import AGREE_SECONDS_MAX
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CONFLICTS, PASSED

FOUND_IN_NEWER = "checks of newer snapshots found conflicts"


class RetentionFate(StrEnum):
    """The fate of a snapshot: it is kept, reduced to its full snapshot (which ends its chain), or deleted."""

    KEEP = "keep"
    ONLY_FULL = "only-full"
    DELETE = "delete"


class HeldSnapshot(Struct, frozen=True):
    """A snapshot as input to the rules. `points` are the cut times of its restore points, from increment `first` on.

    `first` is 0, the full snapshot, unless earlier restore points were given up. `merges` are the increments at which
    the chain can begin, in order. `is_only_cut` is set for a restore point, which has no rows. `checked` is the
    standing check. `is_continuable` is set if an increment can follow, so that nodes keep WAL. `pins` describes the
    pins in force, by increment.
    """

    name: str
    points: tuple[datetime, ...]
    is_whole: bool = True
    is_only_cut: bool = False
    checked: EndedCheck | None = None
    is_continuable: bool = False
    pins: Mapping[int, str] = field(default_factory=dict)
    first: int = 0
    merges: tuple[int, ...] = ()

    @property
    def increments(self) -> range:
        """The increments of `points`."""
        return range(self.first, self.first + len(self.points))

    def following(self, count: KeepCount | None) -> range:
        """Return the increments from the `count`th newest of the full snapshot and the merges on."""
        begins = [self.first, *(merge for merge in self.merges if merge in self.increments[1:])]
        begin = begins[-count] if isinstance(count, int) and count < len(begins) else self.first
        return range(begin, self.increments.stop)

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

    def is_ahead(self, now: datetime) -> bool:
        """Whether a cut was made in the future, so that a clock was or is wrong."""
        return any(point > now + timedelta(seconds=AGREE_SECONDS_MAX) for point in self.points)


class PointVerdict(Struct, frozen=True):
    """The verdict on one restore point: the increment (0: the full snapshot) and its cut's time.

    `why` are the rules and pins that keep this restore point itself. Otherwise it is kept if `needed_by`, the first
    later increment that is kept itself, needs it, or if it `stays_whole` with its chain.
    """

    increment: int
    cut_at: datetime
    why: tuple[str, ...] = ()
    needed_by: int | None = None
    stays_whole: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether the restore point stays."""
        return bool(self.why) or self.needed_by is not None or self.stays_whole


class RetentionVerdict(Struct, frozen=True):
    """The fate of a snapshot, and why: the rules that keep it, or the fact that none does. `points` are in order.

    `begins` is the merge at which a chain that is kept will begin, because no restore point before it is wanted; None
    if nothing is given up. `is_unreduced`: only the beginning of the chain is wanted, but its full snapshot was
    given up, so that it can't be reduced to that: it is kept whole, and nodes keep WAL for it.
    """

    name: str
    fate: RetentionFate
    why: tuple[str, ...]
    points: tuple[PointVerdict, ...] = ()
    begins: int | None = None
    is_unreduced: bool = False

    @property
    def wanted(self) -> tuple[int, ...]:
        """The increments that are kept for their own sake, in order, rather than because others need them."""
        return tuple(point.increment for point in self.points if point.why)


class _Reason(Struct, frozen=True):
    """A rule that keeps a restore point. `is_repeated`: it may keep many restore points of a snapshot.

    `keeps_chain`: it also keeps the increments that may follow, so the chain does not end.
    """

    rule: str
    detail: str
    is_repeated: bool = False
    keeps_chain: bool = False

    @property
    def text(self) -> str:
        return f"{self.rule}: {self.detail}" if self.detail else self.rule


# The reasons to keep restore points, by snapshot and increment.
_Reasons = dict[str, dict[int, list[_Reason]]]


def apply_retention(
    held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool = False
) -> list[RetentionVerdict]:
    """Judge each snapshot, newest first. With `takes_last`, even the last restorable snapshot may be deleted.

    Without any rule, the default rules apply.
    """
    rules = rules.or_default
    newest_first = sorted(
        held, key=lambda snapshot: (snapshot.points[0] if snapshot.points else now, snapshot.name), reverse=True
    )
    counted = [one for one in newest_first if one.is_restorable and not one.is_ahead(now)]
    sound = [one for one in counted if not one.has_conflicts]
    of_all, of_sound = (_reasons(series, counted, rules, now) for series in (counted, sound))
    reasons = {one.name: (of_all if one.has_conflicts else of_sound)[one.name] for one in counted}
    only_cuts = [one for one in newest_first if one.is_whole and one.is_only_cut and not one.is_ahead(now)]
    reasons |= _reasons_of_only_cuts(only_cuts, rules, now)
    protected = {} if takes_last else _protected(counted, sound)
    for name, why in protected.items():
        newest = next(one.increments[-1] for one in counted if one.name == name)
        reasons[name].setdefault(newest, []).extend(_Reason(text, "") for text in why)
    for snapshot in newest_first:
        for increment, text in snapshot.pins.items():
            of_one = reasons.setdefault(snapshot.name, {})
            # A damaged snapshot may have fewer restore points than were pinned, or none.
            pinned = max(min(increment, snapshot.increments.stop - 1), snapshot.first)
            of_one.setdefault(pinned, []).append(_Reason("pinned", text))
    continued = {series[0].name for series in (counted, sound) if series}
    continued |= {one.name for one in counted if one is _with_newest_point(counted)}
    continued |= protected.keys()
    return [
        _verdict(snapshot, reasons.get(snapshot.name, {}), now, is_continued=snapshot.name in continued)
        for snapshot in newest_first
    ]


def list_kept_instead(held: Sequence[HeldSnapshot], rules: Retention, now: datetime, *, takes_last: bool) -> list[str]:
    """Return, newest first, the snapshots whose fate would be different if checks had found no conflicts."""
    verdicts = apply_retention(held, rules, now, takes_last=takes_last)
    unchecked = [replace(snapshot, checked=None) for snapshot in held]
    otherwise = {
        verdict.name: verdict.fate for verdict in apply_retention(unchecked, rules, now, takes_last=takes_last)
    }
    return [verdict.name for verdict in verdicts if verdict.fate is not otherwise[verdict.name]]


def _reasons(
    series: Sequence[HeldSnapshot], counted: Sequence[HeldSnapshot], rules: Retention, now: datetime
) -> _Reasons:
    """Return what the rules keep of a series of snapshots, newest first; `counted` are all that can be restored."""
    reasons: _Reasons = {one.name: defaultdict(list) for one in series}
    places = {one.name: number for number, one in enumerate(counted)}
    for number, one in enumerate(series):
        passed_over = " without conflicts" if places[one.name] != number else ""
        place = f"it is the {_ordinal(number)}newest{passed_over}"
        if _is_among(number, rules.last):
            for increment in one.following(rules.last):
                reasons[one.name][increment].append(_Reason(f"last {rules.last}", place, keeps_chain=True))
        if _is_among(number, rules.only_full):
            reasons[one.name][one.first].append(_Reason(f"only_full {rules.only_full}", place))
    _add_time_rules(reasons, series, rules, now)
    return reasons


def _ordinal(number: int) -> str:
    """Return the place of the snapshot after `number` newer ones: nothing for the newest, then `2nd `, `3rd `."""
    place = number + 1
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending} " if number else ""


def _reasons_of_only_cuts(series: Sequence[HeldSnapshot], rules: Retention, now: datetime) -> _Reasons:
    reasons: _Reasons = {one.name: defaultdict(list) for one in series}
    if rules.rules.keys().isdisjoint(TIME_RULES):
        for one in series:
            reasons[one.name][0].append(_Reason(f"only {', '.join(TIME_RULES)} remove restore points without rows", ""))
        return reasons
    _add_time_rules(reasons, series, rules, now)
    return reasons


def _period_of_week(moment: datetime) -> str:
    week = moment.isocalendar()
    return f"{week.year}-W{week.week:02}"


# The name of the period of a time in UTC, by rule.
PERIODS: dict[str, Callable[[datetime], str]] = {
    "hourly": lambda moment: moment.strftime("%Y-%m-%d %H:00"),
    "daily": lambda moment: moment.strftime("%Y-%m-%d"),
    "weekly": _period_of_week,
    "monthly": lambda moment: moment.strftime("%Y-%m"),
    "yearly": lambda moment: moment.strftime("%Y"),
}


def _add_time_rules(reasons: _Reasons, series: Sequence[HeldSnapshot], rules: Retention, now: datetime) -> None:
    """Add what the rules by time keep of a series. Of several restore points with the same time, one is the newest."""
    newest_first = sorted(
        (
            (point.astimezone(UTC), one.points[0], one.name, increment)
            for one in series
            for increment, point in zip(one.increments, one.points, strict=True)
        ),
        reverse=True,
    )
    if (seconds := rules.within_seconds) is not None:
        reason = _Reason(f"within {duration_text(seconds)}", "", is_repeated=True, keeps_chain=True)
        for moment, _, name, increment in newest_first:
            if now - moment < timedelta(seconds=seconds):
                reasons[name][increment].append(reason)
    for rule in CALENDAR_RULES:
        count = rules.rules.get(rule)
        seen: set[str] = set()
        for moment, _, name, increment in newest_first if isinstance(count, int | str) else ():
            period = PERIODS[rule](moment)
            if period not in seen and _is_among(len(seen), count):
                reasons[name][increment].append(_Reason(f"{rule} {count}", f"newest of {period}", is_repeated=True))
            seen.add(period)


def _is_among(number: int, count: KeepCount | float | None) -> bool:
    return count is not None and (count == ALL or (isinstance(count, int) and number < count))


def _with_newest_point(counted: Sequence[HeldSnapshot]) -> HeldSnapshot | None:
    return max(counted, key=lambda one: (max(one.points), one.points[0], one.name), default=None)


def _protected(counted: Sequence[HeldSnapshot], sound: Sequence[HeldSnapshot]) -> dict[str, list[str]]:
    """Return the snapshots that stay whatever the rules are, and why.

    Newer snapshots that have not been checked yet don't replace the newest valid one, because the next check may find
    conflicts in them too.
    """
    found: dict[str, list[str]] = {}
    if counted:
        last = "last" if len(counted) == 1 else "newest"
        found.setdefault(counted[0].name, []).append(f"it is the {last} snapshot that can be restored")
    newest = _with_newest_point(counted)
    if newest is not None and newest is not counted[0]:
        found.setdefault(newest.name, []).append("it has the newest restore point")
    if sound and sound[0] is not counted[0]:
        found.setdefault(sound[0].name, []).append("it is the newest snapshot without conflicts")
    proven = next((one for one in sound if one.is_valid), None)
    if proven is not None and proven is not sound[0] and counted.index(proven) != sound.index(proven):
        found.setdefault(proven.name, []).append(
            f"it is the newest snapshot found valid by a check, and {FOUND_IN_NEWER}"
        )
    return found


def _verdict(
    one: HeldSnapshot, reasons: Mapping[int, Collection[_Reason]], now: datetime, *, is_continued: bool
) -> RetentionVerdict:
    """Return the verdict on a snapshot. If the rules keep anything of a continued chain, they keep all of it."""
    if not one.is_whole or one.is_ahead(now):
        return _kept_uncounted(one, reasons)
    kept = {increment: tuple(reason.text for reason in why) for increment, why in reasons.items() if why}
    if not kept:
        return RetentionVerdict(one.name, RetentionFate.DELETE, ("no rule keeps it",), _points(one, {}, whole=False))
    why = [*_summaries(reasons.values()), *_note(one)]
    has_increments = len(one.points) > 1
    is_continued = is_continued or any(reason.keeps_chain for found in reasons.values() for reason in found)
    is_reducible = not (is_continued or one.first or one.is_only_cut)
    if max(kept) == 0 and is_reducible and (has_increments or one.is_continuable):
        removed = "increments removed: no rule keeps them"
        if not has_increments:
            removed = "its chain ends here: no rule keeps increments"
        points = _points(one, kept, whole=False)
        return RetentionVerdict(one.name, RetentionFate.ONLY_FULL, (*why, removed), points)
    begins = None if one.has_conflicts else _begin_of(one, min(kept))
    points = _points(one, kept, whole=True, begins=begins)
    is_unreduced = one.first == max(kept) > 0 and one.is_continuable and not is_continued
    return RetentionVerdict(one.name, RetentionFate.KEEP, tuple(why), points, begins, is_unreduced)


def _begin_of(one: HeldSnapshot, wanted: int) -> int | None:
    """Return the newest merge before which no restore point is wanted; None if nothing lies before it."""
    return max((merge for merge in one.merges if one.first < merge <= wanted), default=None)


def _kept_uncounted(one: HeldSnapshot, reasons: Mapping[int, Collection[_Reason]]) -> RetentionVerdict:
    """Return the verdict on a snapshot that is kept and not counted, because its contents or age is not known."""
    why = "it is damaged, so it is not known what would be lost"
    if one.is_whole:
        ahead = _moment(max(one.points).astimezone(UTC))
        why = f"it has a cut in the future ({ahead} UTC), so its age is not known and it is not counted"
    kept = {increment: tuple(reason.text for reason in found) for increment, found in reasons.items()}
    verdict_why = (why, *_summaries(reasons.values()))
    return RetentionVerdict(one.name, RetentionFate.KEEP, verdict_why, _points(one, kept, whole=True))


def _points(
    one: HeldSnapshot, kept: Mapping[int, tuple[str, ...]], *, whole: bool, begins: int | None = None
) -> tuple[PointVerdict, ...]:
    """Return the verdicts on the restore points of a snapshot; `kept` says why some are kept, by increment.

    Those before increment `begins` are given up.
    """
    points: list[PointVerdict] = []
    needed_by: int | None = None
    for increment, cut_at in zip(reversed(one.increments), reversed(one.points), strict=True):
        why = kept.get(increment, ())
        if begins is not None and increment < begins:
            points.append(PointVerdict(increment, cut_at))
            continue
        points.append(PointVerdict(increment, cut_at, why, None if why else needed_by, whole))
        needed_by = increment if why else needed_by
    return tuple(reversed(points))


def _summaries(found: Iterable[Collection[_Reason]]) -> list[str]:
    """Return each reason once, and how many restore points the rules keep that may keep several."""
    texts: list[str] = []
    reasons = [reason for of_point in found for reason in of_point]
    counts = Counter(reason.rule for reason in reasons)
    for reason in reasons:
        points = "1 restore point" if counts[reason.rule] == 1 else f"{counts[reason.rule]:,} restore points"
        text = f"{reason.rule}: {points}" if reason.is_repeated else reason.text
        if text not in texts:
            texts.append(text)
    return texts


def _note(one: HeldSnapshot) -> list[str]:
    """Return a note that the snapshot is not counted because of conflicts; empty if it has none."""
    if one.checked is None or not one.has_conflicts:
        return []
    found_at = _moment(one.checked.moment.astimezone(UTC))
    see = f"see snapshot check {one.name}"
    return [f"it is not counted, because the check that ended at {found_at} UTC found conflicts: {see}"]


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M")
