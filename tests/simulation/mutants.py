"""Deliberately broken rules. Each patches one part of the rule or its surroundings, and duplicates no code.

A simulation is worth what it catches: tests assert that it catches every one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from msgspec import structs

from cutline.columns.bytes_column import BytesColumn, Flags, Ints
from cutline.snapshots.fold.changes import last_of_every_key
from cutline.wal.cut import resolve as rule
from cutline.wal.cut.cut_events import FleetEvents, NodeWindow, fleet_events
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.segments.segments import COMMIT
from tests.simulation import made_cuts, promises
from tests.simulation.fleet_model import Look, World
from tests.simulation.fleet_records import Change, Node, Wave
from tests.simulation.made_cuts import ResolvedCut

Mutant = Callable[[], AbstractContextManager[object]]


def no_raising() -> AbstractContextManager[object]:
    """Leave all positions at the start markers."""
    real = rule._raise_positions

    def broken(events: FleetEvents, history: rule._History) -> object:
        # An end at position 0 raises nothing.
        return real(
            structs.replace(events, prepared=structs.replace(events.prepared, end=np.zeros_like(events.prepared.end))),
            history,
        )

    return patch.object(rule, "_raise_positions", broken)


def tagged_commits_do_not_raise() -> AbstractContextManager[object]:
    """Raise positions for prepared transactions only, not for tagged one-phase commits."""
    real = rule._raise_positions

    def broken(events: FleetEvents, history: rule._History) -> object:
        is_tagged = np.isin(events.prepared.place, events.committed.place)
        ends = np.where(is_tagged, 0, events.prepared.end)
        return real(structs.replace(events, prepared=structs.replace(events.prepared, end=ends)), history)

    return patch.object(rule, "_raise_positions", broken)


def tags_are_not_known() -> AbstractContextManager[object]:
    """Take a coordinator's one-phase commit for a local one."""
    real = made_cuts.events_table

    def broken(nodes: Sequence[Node]) -> object:
        return real([replace(node, gid=gids_of(node)) for node in nodes])

    def gids_of(node: Node) -> list[str | None]:
        return [None if op == COMMIT else gid for op, gid in zip(node.op, node.gid, strict=True)]

    return patch.object(made_cuts, "events_table", broken)


def decoded_to_the_start_only() -> AbstractContextManager[object]:
    """Ignore the WAL between the markers."""
    return patch.object(made_cuts, "decoded_until", lambda wave, node: wave.starts[node])


def finish_before_all_starts() -> AbstractContextManager[object]:
    """Write a node's finish marker after its own start marker, without waiting for the other nodes."""

    def broken(world: World, wave: Wave, node: int) -> list[int]:
        return [node]

    return patch.object(World, "finish_after", broken)


def early_ones_applied_twice() -> AbstractContextManager[object]:
    """Apply a transaction that was included early again, at its COMMIT PREPARED in the next increment."""
    real = made_cuts.changes_at

    def broken(world: World, node: int, cut: NodeCut, excluded: set[int], previous: ResolvedCut | None) -> list[Change]:
        found = real(world, node, cut, excluded, previous)
        if previous is None:
            return found
        window = range(previous.nodes[node].position, cut.position)
        known = [one for one in found if one.part in previous.state]
        return found + [one for one in known if world.parts[one.part].commit_lsn in window]

    return patch.object(made_cuts, "changes_at", broken)


def undecided_not_carried() -> AbstractContextManager[object]:
    """Forget what the previous cut left undecided."""
    return patch.object(made_cuts, "undecided_for_next", lambda cut: ())


def in_doubt_not_carried() -> AbstractContextManager[object]:
    """Forget what was in doubt at the previous cut."""
    return patch.object(made_cuts, "in_doubt_for_next", lambda cut: ())


def ddl_not_awaited() -> AbstractContextManager[object]:
    """Take a cut that includes DDL which its nodes have not committed."""
    return patch.object(promises, "included_in_doubt", lambda nodes: {})


def prepared_listed_after_the_catalogs() -> AbstractContextManager[object]:
    """Read the catalogs for the commit before what is prepared is listed."""
    real = World._look

    def broken(world: World, wave: Wave, first: Look, then: Look | None) -> None:
        real(world, wave, then or first, first if then else None)

    return patch.object(World, "_look", broken)


def rollbacks_not_known() -> AbstractContextManager[object]:
    """Take a rolled back part for a part of a later transaction with the same gid."""

    def broken(windows: Mapping[str, NodeWindow]) -> object:
        events = fleet_events(windows)
        return structs.replace(events, undone=np.zeros_like(events.undone))

    return patch.object(rule, "fleet_events", broken)


def only_what_is_committed_everywhere() -> AbstractContextManager[object]:
    """Leave a transaction out until it is committed on all of its nodes."""
    real = made_cuts.changes_at

    def broken(world: World, node: int, cut: NodeCut, excluded: set[int], previous: ResolvedCut | None) -> list[Change]:
        found = real(world, node, cut, excluded, previous)
        return [one for one in found if is_over_everywhere(world, one.part, cut)]

    def is_over_everywhere(world: World, number: int, cut: NodeCut) -> bool:
        # This node's start marker identifies the cut.
        wave = next(each for each in world.waves if cut.start in each.starts.values())
        parts = world.parts[number].transaction.parts
        return all(part.commit_lsn is not None and part.commit_lsn < wave.starts[part.node] for part in parts)

    return patch.object(made_cuts, "changes_at", broken)


def early_ones_left_out_again() -> AbstractContextManager[object]:
    """Leave a transaction that was included early out of the next cut while its COMMIT PREPARED is missing."""
    real = made_cuts.changes_at

    def broken(world: World, node: int, cut: NodeCut, excluded: set[int], previous: ResolvedCut | None) -> list[Change]:
        found = real(world, node, cut, excluded, previous)
        known = previous.state if previous else set()
        return [one for one in found if one.part not in known or world.parts[one.part].commit_lsn is not None]

    return patch.object(made_cuts, "changes_at", broken)


def first_image_wins() -> AbstractContextManager[object]:
    """Fold to the first image of a row instead of the last."""

    def broken(groups: Ints, keys: BytesColumn, lsn: Ints, seq: Ints) -> Flags:
        return last_of_every_key(groups, keys, -lsn, seq)

    return patch.object(promises, "last_of_every_key", broken)


# Each mutant with the promise that it breaks.
MUTANTS: Mapping[Mutant, str] = {
    no_raising: "atomic",
    tagged_commits_do_not_raise: "atomic",
    tags_are_not_known: "atomic",
    decoded_to_the_start_only: "atomic",
    finish_before_all_starts: "atomic",
    only_what_is_committed_everywhere: "causal",
    undecided_not_carried: "undecided",
    in_doubt_not_carried: "in doubt",
    ddl_not_awaited: "whole",
    prepared_listed_after_the_catalogs: "whole",
    rollbacks_not_known: "undecided",
    early_ones_left_out_again: "monotone",
    early_ones_applied_twice: "ordered",
    first_image_wins: "ordered",
}
