"""Deliberately broken rules of continuing after a failover. Each patches one part of the product's code.

A simulation is worth what it catches: tests assert that it catches every one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes import sessions as node_sessions
from cutline.nodes.sessions import Sessions
from cutline.snapshots.create import continuable, make_cut, renewal
from cutline.snapshots.create.context import ChainState
from cutline.snapshots.create.renewal import NewCopies
from cutline.snapshots.records.chain import Chain
from cutline.wal.drain import drain as draining
from cutline.wal.drain.slots import SlotState
from tests.simulation import failover_chain

Mutant = Callable[[], AbstractContextManager[object]]


def _within_the_model(
    patches: Callable[[failover_chain.FailoverChain], AbstractContextManager[object]],
) -> AbstractContextManager[object]:
    """Patch what the model patches as well."""
    real = failover_chain.patched

    @contextmanager
    def broken(chain: failover_chain.FailoverChain) -> Iterator[None]:
        with real(chain), patches(chain):
            yield

    return patch.object(failover_chain, "patched", broken)


def no_timeline_check() -> AbstractContextManager[object]:
    """Continue on whatever timeline the server is."""
    return patch.object(TimelineHistory, "parted_from", lambda was, now: None)


def any_switch_will_do() -> AbstractContextManager[object]:
    """Want the recorded timeline to be an ancestor, wherever it ended."""
    late = Lsn(1 << 60)
    return _within_the_model(
        lambda chain: patch.object(
            node_sessions, "read_switches", lambda node, timeline: dict.fromkeys(range(1, timeline), late)
        )
    )


def markers_are_not_compared() -> AbstractContextManager[object]:
    """Trust a server whose slot is before the end of the archive."""
    stack = ExitStack()
    for module in (draining, make_cut):
        stack.enter_context(patch.object(module, "check_markers", lambda node, expected, found: None))
    return stack


def slot_may_be_ahead() -> AbstractContextManager[object]:
    """Continue from a slot that is ahead of the archive."""
    stack = ExitStack()
    for module in (draining, continuable):
        stack.enter_context(patch.object(module, "check_slot", partial(_check_lost_slot, module.check_slot)))
    return stack


def _check_lost_slot(
    check: Callable[..., SlotState],
    node: str,
    name: str,
    state: SlotState | None,
    archived: int,
    *others: str,
    **more: str,
) -> SlotState:
    return check(node, name, state, max(archived, state.confirmed if state else 0), *others, **more)


def prepared_are_not_awaited() -> AbstractContextManager[object]:
    """Make the first cut of a new copy without waiting for transactions that were prepared before it."""
    return _within_the_model(lambda chain: patch.object(renewal, "await_prepared", lambda sessions, *others: None))


def last_cut_is_kept() -> AbstractContextManager[object]:
    """Take what the last cut left undecided into the first cut of a new copy."""
    real = NewCopies.state_after

    def broken(new: NewCopies, state: ChainState, operation: str, sessions: Sessions) -> ChainState:
        return replace(real(new, state, operation, sessions), last_cut=state.last_cut)

    return patch.object(NewCopies, "state_after", broken)


def old_archive_is_kept() -> AbstractContextManager[object]:
    """Read the segments of a copy's old archive after it began again."""

    def broken(chain: Chain) -> Mapping[str, tuple[Any, ...]]:
        found: dict[str, list[Any]] = {}
        for commit in chain.commits:
            for node, segments in commit.segments.items():
                found.setdefault(node, []).extend(segments)
        return {node: tuple(segments) for node, segments in found.items()}

    return patch.object(Chain, "_segments", property(broken))


def new_copy_goes_on_in_the_old_archive() -> AbstractContextManager[object]:
    """Continue the archive that a copy had before it began again."""
    real = NewCopies.state_after

    def broken(new: NewCopies, state: ChainState, operation: str, sessions: Sessions) -> ChainState:
        kept = real(new, state, operation, sessions)
        return replace(kept, archives=state.archives, segments=state.segments, base=state.base)

    return patch.object(NewCopies, "state_after", broken)


# Each mutant with the promises that it may break; a history reports the first that it finds broken.
MUTANTS: Mapping[Mutant, str] = {
    old_archive_is_kept: "history|atomic",
    prepared_are_not_awaited: "atomic|undecided|in doubt",
    new_copy_goes_on_in_the_old_archive: "continues",
    last_cut_is_kept: "undecided|in doubt",
    no_timeline_check: "undecided|atomic|causal|complete",
    any_switch_will_do: "undecided|atomic|causal|complete",
    markers_are_not_compared: "undecided|atomic|causal|complete",
    slot_may_be_ahead: "undecided|atomic|causal|complete",
}
