"""Every short history of a shard whose standbys are promoted: restores, copies that begin again, and what is named.

The steps of a history are creates that commit or die, standbys that are cut off, promotions with what a standby then
has, switchovers, rebuilt servers, and old primaries that accept writes again. All histories of a few steps are run, so
the archives of standbys are ahead of the primary's, behind it or absent, and promotions follow each other between
creates. After each, the chain goes on.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from unittest.mock import patch

import pytest

from cutline.fleet.lsn import Lsn
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes import sessions as node_sessions
from cutline.nodes.baseline import FleetTopologyError
from cutline.snapshots.create import continuable
from cutline.snapshots.records import commit_rules
from cutline.wal.drain import drain as draining
from tests.run.soak import first
from tests.simulation import failover_mutants
from tests.simulation.failover_mutants import Mutant
from tests.simulation.fleet_model import RECORD_SIZES
from tests.simulation.promotion_chain import SLOT, PromotionChain, new_chain
from tests.simulation.promotion_model import PRIMARY
from tests.simulation.runs import PromiseBrokenError

Step = Callable[[PromotionChain], bool | None]
ONE, OTHER = f"{PRIMARY}-b1", f"{PRIMARY}-b2"


def increment(chain: PromotionChain) -> None:
    """Take an increment; it may only fail if the primary may be an old one."""
    if not chain.create():
        assert chain.failed, "an increment died"
        assert re.search("it may be the old primary from before a failover", chain.failed.message), chain.failed.message


def die_early(chain: PromotionChain) -> None:
    """Archive the primary's transactions, each in a segment, and die before a marker is archived."""
    chain.segments_left = chain.count_waiting() or 1
    chain.create()


def die_with_standbys_ahead(chain: PromotionChain) -> None:
    """Archive all WAL of the standbys and none of the primary's, and die."""
    chain.only_standbys = True
    chain.create()


def die_late(chain: PromotionChain) -> None:
    """Archive everything, and die before the commit."""
    chain.dies_at_end = True
    chain.create()


def write(chain: PromotionChain) -> None:
    """Commit a transaction."""
    chain.world.commit()


def cut_off(name: str) -> Step:
    def step(chain: PromotionChain) -> bool:
        chain.world.cut_off.add(name)
        return name in chain.world.standbys

    return step


def promote(name: str) -> Step:
    def step(chain: PromotionChain) -> bool:
        if name not in chain.world.standbys:
            return False
        chain.world.promote(name)
        return True

    return step


def switch_over(chain: PromotionChain) -> bool:
    """Exchange the primary and a standby that can follow."""
    name = ONE if chain.world.listed != ONE else PRIMARY
    if name not in chain.world.standbys or chain.world.standbys[name].end > chain.world.servers[0].end:
        return False
    chain.world.cut_off.discard(name)
    chain.world.replicate()
    if chain.world.standbys[name].end != chain.world.servers[0].end:
        return False
    chain.world.switch_over(name)
    return True


def rebuild(chain: PromotionChain) -> bool:
    """Let all servers be standbys again, by copies of the primary."""
    chain.world.rebuild()
    chain.world.cut_off.clear()
    chain.world.replicate()
    return True


def connect(chain: PromotionChain) -> bool:
    """Let the standbys that were cut off follow again."""
    had = bool(chain.world.cut_off)
    chain.world.cut_off.clear()
    chain.world.replicate()
    return had


def take_back(chain: PromotionChain) -> bool:
    """Let a server that is down accept writes in the place of the one that was promoted."""
    if not chain.world.away:
        return False
    chain.world.take_back(sorted(chain.world.away)[0])
    return True


STEPS: Mapping[str, Step] = {
    "increment": increment,
    "die-early": die_early,
    "die-with-standbys-ahead": die_with_standbys_ahead,
    "die-late": die_late,
    "cut-off-one": cut_off(ONE),
    "cut-off-other": cut_off(OTHER),
    "connect": connect,
    "promote-one": promote(ONE),
    "promote-other": promote(OTHER),
    "switch-over": switch_over,
    "rebuild": rebuild,
    "take-back": take_back,
}
# Steps of the histories that are written down.
WRITTEN_STEPS: Mapping[str, Step] = {**STEPS, "write": write}


def run(names: Sequence[str], tally: Counter[str], *, writes: bool, standbys: int = 2) -> bool:
    """Run a history, with a transaction after every step or none; return False if one of its steps is impossible."""
    chain = new_chain(standbys, tally)
    world = chain.world
    try:
        world.commit()
        assert chain.create(), "the first increment fails"
        world.commit()
        world.commit()
        for name in names:
            if WRITTEN_STEPS[name](chain) is False:
                return False
            if writes:
                world.commit()
        finish(chain)
    except (AssertionError, PromiseBrokenError) as error:
        story = "\n".join(world.events)
        raise PromiseBrokenError(f"{' '.join(names)}, writes={writes}: {error}\n{story}") from error
    tally["histories"] += 1
    return True


def finish(chain: PromotionChain) -> None:
    """Two increments follow; if the primary is an old one, they are refused until the other server is back."""
    chain.world.commit()
    if not chain.create():
        assert chain.failed, "an increment died"
        tally_refused(chain)
        # Now the server that the chain knows is the primary again.
        chain.world.take_back(next(reversed(chain.world.away)))
        assert chain.create(), f"continues: {chain.failed and chain.failed.message}"
    chain.world.commit()
    assert chain.create(), f"continues: {chain.failed and chain.failed.message}"
    chain.check_kept()


def tally_refused(chain: PromotionChain) -> None:
    assert chain.failed
    is_old = "it may be the old primary from before a failover" in chain.failed.message
    assert is_old, f"continues: {chain.failed.message}"
    chain.tally["old primary refused"] += 1


def run_all(names: Iterable[tuple[str, ...]]) -> Counter[str]:
    """Run these histories, with writes and without."""
    tally: Counter[str] = Counter()
    for history in names:
        for writes in (True, False):
            run(history, tally, writes=writes)
    return tally


# Both standbys are promoted at the same position, each when it does not know of the other.
SAME_HISTORY = "cut-off-other promote-one write write"
# The second of them begins a timeline with the number of the first's at another position, and one more after that.
SAME_NUMBERS = "cut-off-other write increment promote-one write increment" + " write" * 6
SAME_NUMBERS += " increment promote-other write write rebuild switch-over"
# Each is one that a broken rule gets wrong; see BROKEN.
KNOWN = (
    "cut-off-one increment promote-one",
    "cut-off-one die-late promote-one",
    "cut-off-one die-early promote-one",
    "cut-off-other promote-one increment promote-other",
    "cut-off-other promote-one die-early promote-other",
    "cut-off-other promote-one die-late promote-other",
    "die-with-standbys-ahead promote-one",
    "cut-off-one die-with-standbys-ahead promote-one",
    "die-with-standbys-ahead promote-other increment",
    "increment promote-one",
    "promote-one promote-other",
    "promote-one die-early",
    "promote-one die-late",
    "promote-one increment take-back",
    "cut-off-one increment promote-one take-back",
    "cut-off-one promote-one die-late take-back",
    "cut-off-one promote-one die-early take-back",
    "cut-off-one increment promote-one rebuild switch-over",
    "cut-off-one cut-off-other increment promote-one increment promote-other",
    "cut-off-one increment increment promote-one rebuild increment",
    SAME_NUMBERS,
    f"{SAME_HISTORY} increment promote-other write write write write",
    f"{SAME_HISTORY} die-early promote-other",
)
# What must occur in them.
OCCURS = (
    "with a loss",
    "primary renewed",
    "shown what is lost",
    "unknown what is lost",
    "found while it was read",
    "on another timeline",
    "old primary refused",
)


def test_known_histories_keep_every_promise() -> None:
    tally = run_all(tuple(history.split()) for history in KNOWN)
    assert tally["histories"] == 2 * len(KNOWN)
    assert [name for name in OCCURS if not tally[name]] == []


# At first, no standby is cut off, and no server is down.
BEGINS = [step for step in STEPS if step not in ("connect", "take-back")]


@pytest.mark.parametrize("begin", first(BEGINS, 2))
def test_every_history_of_two_steps_keeps_every_promise(begin: str) -> None:
    assert run_all((begin, step) for step in STEPS)["histories"] > len(STEPS)


@pytest.mark.long
@pytest.mark.rest
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("begin", BEGINS)
def test_every_history_of_three_steps_keeps_every_promise(begin: str) -> None:
    # With writes and without; of the second and third steps, about half are possible.
    assert run_all((begin, *steps) for steps in product(STEPS, STEPS))["histories"] > 100


@pytest.mark.parametrize("begin", first(range(0, 200, 10)))
def test_longer_histories_keep_every_promise(begin: int) -> None:
    """Of eight steps, with a transaction after most of them; those that are impossible are passed over."""
    for seed in range(begin, begin + 10):
        draw = random.Random(seed)
        chain = new_chain(2, Counter())
        story = []
        try:
            chain.world.commit()
            assert chain.create()
            for name in draw.choices([*STEPS], k=8):
                if STEPS[name](chain) is not False:
                    story.append(name)
                    if draw.randrange(3):
                        chain.world.commit()
                        story.append("write")
            finish(chain)
        except AssertionError as error:
            raise PromiseBrokenError(f"seed {seed}: {' '.join(story)}: {error}") from error


def lead_to_the_same_position(chain: PromotionChain) -> None:
    """Promote a server whose slot is where the archive ends, on another timeline with the same number.

    A create archived the WAL of the standby `ONE` and not of the primary, and died. Then the chain went on at the other
    standby, which lacks that WAL, up to the same position.
    """
    world = chain.world
    world.commit()
    assert chain.create()
    world.cut_off.add(OTHER)
    for _ in range(2):
        world.commit()
    die_with_standbys_ahead(chain)
    ahead = world.standbys[ONE].slots[SLOT]
    world.promote(OTHER)
    world.commit()
    # Where both markers of the create fit.
    world.nodes[0].end = ahead - 2 * RECORD_SIZES[0]
    assert world.nodes[0].end >= world.servers[0].end
    assert chain.create()
    assert chain.chain.newest_segments(PRIMARY)[-1].through == ahead
    world.promote(ONE)
    assert (chain.chain.last.timelines[PRIMARY], world.servers[0].timeline) == (2, 2)
    world.commit()


def test_a_slot_where_the_archive_ends_may_be_on_another_timeline_with_the_same_number() -> None:
    chain = new_chain(2, Counter())
    lead_to_the_same_position(chain)
    assert chain.create()
    lost = chain.chain.last.renewed[PRIMARY].lost
    assert lost is not None
    assert lost.since == 2
    finish(chain)
    # The commit shows it, too; if nothing does, two histories are mixed.
    with numbers_are_compared():
        chain = new_chain(2, Counter())
        lead_to_the_same_position(chain)
        assert not chain.create()
        assert chain.failed
        assert "the previous commit has another history" in chain.failed.message
        with (
            patch.object(commit_rules, "_check_switches", lambda *of: None),
            pytest.raises(
                AssertionError, match=r"^history: parts \[\d\] are restored, and no surviving server has them"
            ),
        ):
            chain.create()


@pytest.mark.parametrize("rival", [PRIMARY, ONE])
def test_two_servers_that_accept_writes_are_refused_and_named(rival: str) -> None:
    """Either the old primary comes back, or a standby is promoted while the primary runs."""
    chain = new_chain(2, Counter())
    world = chain.world
    world.commit()
    assert chain.create()
    world.cut_off.add(ONE)
    world.commit()
    if rival == PRIMARY:
        world.promote(ONE)
        world.standbys[PRIMARY] = world.away.pop(PRIMARY)
        world.cut_off.add(PRIMARY)
    slots = [dict(server.slots) for server in (world.servers[0], *world.standbys.values())]
    world.rival = rival
    assert not chain.create()
    assert isinstance(chain.failed, FleetTopologyError)
    assert (
        f"node {ONE} is not a standby, but fleet.toml says backup_of = {PRIMARY}: both accept" in chain.failed.message
    )
    assert chain.chain.last.increment == 1
    assert [server.slots for server in (world.servers[0], *world.standbys.values())] == slots
    world.rival = ""
    finish(chain)


def ignore_unlisted() -> AbstractContextManager[object]:
    """Compare only the history that the last commit has."""
    stack = ExitStack()
    for module in (draining, continuable):
        stack.enter_context(patch.object(module, "check_archived_history", lambda *segment_and_history: None))
    return stack


def numbers_are_compared() -> AbstractContextManager[object]:
    """Take timelines with the same number for the same timeline."""
    real = TimelineHistory.parted_from

    def broken(was: TimelineHistory, now: TimelineHistory) -> Lsn | None:
        if was.timeline == now.timeline:
            return None
        return real(was, now) if was.timeline not in now.switches else now.switches[was.timeline]

    return patch.object(TimelineHistory, "parted_from", broken)


def switch_at_the_end_is_too_early() -> AbstractContextManager[object]:
    """Want the switch to be after the end of the archive."""

    def broken(_chain: object) -> AbstractContextManager[object]:
        real = node_sessions.read_switches
        earlier = lambda node, timeline: {one: Lsn(at - 1) for one, at in real(node, timeline).items()}  # noqa: E731
        return patch.object(node_sessions, "read_switches", earlier)

    return failover_mutants._within_the_model(broken)


def ends_are_not_compared() -> AbstractContextManager[object]:
    """Trust a server whose slot is before the end of the archive, if no marker is between."""
    return patch.object(draining, "check_ends", lambda node, missing: None)


# Broken rules, each with a history that shows it, whether there are transactions between its steps, and the promise.
BROKEN: tuple[tuple[Mutant, str, bool, str], ...] = (
    (failover_mutants.no_timeline_check, "cut-off-one increment promote-one", True, "named"),
    (failover_mutants.any_switch_will_do, "cut-off-one increment promote-one", True, "named"),
    (ignore_unlisted, "cut-off-one die-early promote-one", True, "named"),
    (numbers_are_compared, SAME_NUMBERS, False, "named"),
    (switch_at_the_end_is_too_early, "increment promote-one", False, "renewal"),
    (
        failover_mutants.markers_are_not_compared,
        f"{SAME_HISTORY} increment promote-other write write write write",
        False,
        "history",
    ),
    (ends_are_not_compared, f"{SAME_HISTORY} die-early promote-other", False, "history"),
    (failover_mutants.slot_may_be_ahead, "die-with-standbys-ahead promote-one", True, "complete"),
    (failover_mutants.old_archive_is_kept, "cut-off-one increment promote-one", True, "history"),
    (
        failover_mutants.new_copy_goes_on_in_the_old_archive,
        "cut-off-one increment promote-one",
        True,
        "continues",
    ),
)


@pytest.mark.parametrize(("broken", "history", "writes", "promise"), BROKEN)
def test_a_broken_rule_is_caught(broken: Mutant, history: str, promise: str, *, writes: bool) -> None:
    with broken(), pytest.raises(PromiseBrokenError, match=rf": {promise}\b"):
        run(history.split(), Counter(), writes=writes)
