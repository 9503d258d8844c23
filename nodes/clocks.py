"""The primaries' clocks, compared with each other and with this machine's clock.

Retention, leases, and the times of cuts and operations need one trustworthy clock. The primaries' clocks take
precedence, because they timestamp the transactions. If they differ too much from each other, a majority of them must
agree or, failing that, a majority of all clocks including this machine's. Without a majority, no clock is trusted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from cutline.fleet.messages import NEW_CHAIN, NODES_NAMED_MAX, group_by_value, list_some, name_nodes
from cutline.fleet.progress import Progress
from cutline.storage.clock import follow_machine, machine_now, set_time, steady_seconds, utc_now
from cutline.storage.errors import ChainEnd, RefusedError

if TYPE_CHECKING:
    import psycopg

# This machine's clock is corrected if it is off by more than this. Smaller differences may be due to network latency.
OFF_SECONDS_MAX = 1.0
# Clocks that differ by more than this do not agree. Kerberos tolerates the same difference; leases tolerate more.
AGREE_SECONDS_MAX = 300.0
NODES_SHOWN_MAX = 3
# The latest time that Python can represent.
LATEST_SECONDS = datetime.max.replace(tzinfo=UTC).timestamp() - 1
CLOCK_QUERY = "SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8"

# The error of this machine's clock when it was last reported.
_told_seconds = 0.0


class ClocksDifferError(RefusedError):
    """The nodes' clocks and this machine's clock differ too much to trust any of them."""


class ClockReading(Struct, frozen=True):
    """A node's time, read between `asked_at` and `answered_at` by this machine's clock.

    `steady` is the value of `steady_seconds` when the answer arrived.
    """

    node: str
    time: datetime
    asked_at: datetime
    answered_at: datetime
    steady: float = field(default_factory=steady_seconds)

    @property
    def ahead_seconds(self) -> float:
        """How far the node's clock is ahead of this machine's, assuming it was read midway between the two times."""
        return (self.least_seconds + self.most_seconds) / 2

    @property
    def least_seconds(self) -> float:
        """The least that the node's clock can be ahead of this machine's."""
        return (self.time - self.answered_at).total_seconds()

    @property
    def most_seconds(self) -> float:
        """The most that the node's clock can be ahead of this machine's."""
        return (self.time - self.asked_at).total_seconds()


class Agreement(Struct, frozen=True):
    """The time that the clocks agree on, given as seconds ahead of this machine's clock (0 if that clock is right).

    `nodes` are the nodes whose clocks agree; the set may be empty if this machine's clock is trusted. `middle` is the
    reading to use if this machine's clock is wrong.
    """

    ahead_seconds: float
    nodes: frozenset[str]
    middle: ClockReading | None = None


def read_clock(node: str, connection: psycopg.Connection[Any]) -> ClockReading:
    """Read the clock of the session's node."""
    asked_at = machine_now()
    row = connection.execute(CLOCK_QUERY).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    return ClockReading(node, time_of_epoch(row[0]), asked_at, machine_now())


def time_of_epoch(seconds: float) -> datetime:
    """Convert a server's time from seconds since 1970."""
    return datetime.fromtimestamp(min(seconds, LATEST_SECONDS), UTC)


def find_agreement(readings: Collection[ClockReading], not_before: datetime | None = None) -> Agreement | None:
    """Return the agreement of the clocks, or None if too few agree.

    Clocks that show a time before `not_before` are wrong and are ignored. A majority of the nodes' clocks must agree
    or, failing that, a majority of all clocks including this machine's.
    """
    now = max((reading.answered_at for reading in readings), default=machine_now())
    least = (not_before - now).total_seconds() - AGREE_SECONDS_MAX if not_before else float("-inf")
    nodes = [reading for reading in readings if reading.ahead_seconds >= least]
    machine = [0.0] if least <= 0 else []
    agreeing = _largest_group(nodes, [])
    if not nodes or len(agreeing) * 2 <= len(nodes):
        agreeing = _largest_group(nodes, machine)
        count = len(agreeing) + len([one for one in machine if _agree(one, agreeing)])
        if count * 2 <= len(nodes) + len(machine):
            return None
    if not agreeing:
        return Agreement(0.0, frozenset())
    middle = sorted(agreeing, key=lambda one: one.ahead_seconds)[(len(agreeing) - 1) // 2]
    is_right = middle.least_seconds <= OFF_SECONDS_MAX and middle.most_seconds >= -OFF_SECONDS_MAX
    ahead_seconds, standing = (0.0, None) if is_right else (middle.ahead_seconds, middle)
    return Agreement(ahead_seconds, frozenset(reading.node for reading in agreeing), standing)


def _agree(ahead_seconds: float, group: Collection[ClockReading]) -> bool:
    ahead = [ahead_seconds, *(reading.ahead_seconds for reading in group)]
    return max(ahead) - min(ahead) <= AGREE_SECONDS_MAX


def _largest_group(nodes: Collection[ClockReading], machine: Collection[float]) -> list[ClockReading]:
    """Return the nodes of the largest group of clocks that agree, counting this machine's."""
    ahead = [*(node.ahead_seconds for node in nodes), *machine]
    # Comparing each clock with every other would take seconds for a thousand nodes.
    ordered = sorted(ahead)

    def size_from(first: float) -> int:
        return bisect_right(ordered, first + AGREE_SECONDS_MAX) - bisect_left(ordered, first)

    if not ahead:
        return []
    first = max(ahead, key=size_from)
    return [node for node in nodes if first <= node.ahead_seconds <= first + AGREE_SECONDS_MAX]


def use_clocks(readings: Collection[ClockReading], not_before: datetime | None = None) -> Agreement | None:
    """Set this process's time to the time that the clocks agree on; return the agreement, or None if there is none."""
    agreement = find_agreement(readings, not_before)
    if agreement is not None and (middle := agreement.middle) is not None:
        set_time(middle.answered_at + timedelta(seconds=middle.ahead_seconds), middle.steady)
    elif agreement is None and not_before is not None and not_before > machine_now():
        # The current time can't be before the last cut.
        set_time(not_before, steady_seconds())
    else:
        follow_machine()
    return agreement


def note_clocks(
    readings: Collection[ClockReading], progress: Progress, not_before: datetime | None = None
) -> Agreement | None:
    """Call `use_clocks`; warn if this machine's clock is wrong, or if no clock can be trusted."""
    agreement = use_clocks(readings, not_before)
    if agreement is None:
        agree = find_agreement(readings) is not None
        progress.note(_differ_text(readings, not_before, are_too_early=agree))
    else:
        _note_machine(agreement, progress)
    return agreement


def _note_machine(agreement: Agreement, progress: Progress) -> None:
    """Warn if this machine's clock is wrong; warn again only if the difference changes."""
    global _told_seconds  # process-wide state
    if abs(agreement.ahead_seconds - _told_seconds) > OFF_SECONDS_MAX:
        _told_seconds = agreement.ahead_seconds
        if agreement.ahead_seconds:
            off = (
                f"{_difference_text(agreement.ahead_seconds)} {'behind' if agreement.ahead_seconds > 0 else 'ahead of'}"
            )
            nodes = f"node{'s'[: len(agreement.nodes) - 1]} {list_some(sorted(agreement.nodes), NODES_SHOWN_MAX)}"
            progress.note(
                f"this machine's clock is {off} {nodes}: the nodes' time is used; synchronize this machine's clock"
            )


def note_late_clock(cut_at: datetime, progress: Progress) -> None:
    """Warn if the time of the cut is in the future, and continue. For commands that don't contact any nodes."""
    if cut_at - utc_now() > timedelta(seconds=AGREE_SECONDS_MAX):
        progress.note(_differ_text((), cut_at, are_too_early=True))
        set_time(cut_at, steady_seconds())


def check_clocks(
    readings: Collection[ClockReading], progress: Progress, not_before: datetime | None = None
) -> Agreement:
    """Call `use_clocks`; raise ClocksDifferError if no clock can be trusted.

    `not_before` is the time of the last cut.
    """
    agreement = use_clocks(readings, not_before)
    if agreement is not None:
        _note_machine(agreement, progress)
        return agreement
    also = ""
    ends_chain = ChainEnd.NO
    if are_too_early := not_before is not None and find_agreement(readings) is not None:
        also = f"; if the clocks are right, the time of that cut is wrong: {NEW_CHAIN}"
        ends_chain = ChainEnd.PERHAPS
    raise ClocksDifferError(
        _differ_text(readings, not_before, are_too_early=are_too_early),
        hint=f"synchronize the clocks of the nodes and of this machine with NTP, then repeat the command{also}",
        ends_chain=ends_chain,
        details={
            "times": {reading.node: reading.time.isoformat() for reading in readings},
            "here": machine_now().isoformat(),
        },
    )


def _differ_text(readings: Collection[ClockReading], not_before: datetime | None, *, are_too_early: bool) -> str:
    """Say why no clock can be trusted. `are_too_early`: the clocks agree, but show a time before the last cut."""
    machine = f"{_shown(machine_now())} according to this machine"
    times = [f"{_shown(reading.time)} according to node {reading.node}" for reading in readings]
    if len(times) > NODES_NAMED_MAX:
        alike = group_by_value({reading.node: _shown(reading.time) for reading in readings})
        times = [f"{time} according to {name_nodes(nodes)}" for time, nodes in alike.items()]
    shown = ", ".join([*times, machine])
    if not_before is not None and (are_too_early or not readings):
        return f"a cut was made at {_shown(not_before)}, but it is now {shown}"
    return f"the clocks disagree, so none can be trusted: it is {shown}"


def _shown(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _difference_text(seconds: float) -> str:
    whole = abs(seconds)
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if whole >= 2 * size:
            return f"{whole / size:.0f} {unit}"
    return f"{whole:.1f} s"
