"""What docs/consistency.md promises of every cut, asserted on all cuts of histories of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from columns.bytes_column import BytesColumn
from fleet.lsn import Lsn
from snapshots.fold.superseding import last_of_every_key
from tests.simulation.fleet_model import World
from tests.simulation.fleet_records import APPENDED, ROWS_PER_NODE, Part, Transaction
from tests.simulation.made_cuts import Made, cuts_of
from wal.cut.cut_values import Cut, Undecided

# Keys of one byte, one after the other.
KEY_BYTES = np.arange(ROWS_PER_NODE, dtype=np.uint8)


def check_histories(worlds: Sequence[World]) -> Counter[str]:
    """Assert every promise on every cut of fleets side by side; return what there was in them to be checked."""
    tally: Counter[str] = Counter(histories=len(worlds), reused_gids=sum(world.reused_gids for world in worlds))
    made: list[list[Made]] = []
    for cut, cuts in cuts_of(worlds):
        counted: Counter[str] = Counter()
        for number, (world, one) in enumerate(zip(worlds, cuts, strict=True)):
            before = made[-1][number] if made else None
            if before:
                check_monotone(world, one, before)
            check_atomic(world, one)
            check_causal(world, one)
            check_positions(world, one)
            check_carried(world, one, tally)
            count_entered(world, one, before, counted)
        check_counts(cut, counted)
        tally += counted
        made.append(cuts)
    by_world = list(zip(*made, strict=True))
    check_order(worlds, by_world)
    tally["cuts"] += sum(map(len, by_world))
    for world, cuts_made in zip(worlds, by_world, strict=True):
        tally["in doubt for ever"] += sum(in_doubt(part) for part in world.parts)
        tally["carried over two cuts"] += carried_over(world, cuts_made)
    return tally


def check_monotone(world: World, made: Made, before: Made) -> None:
    """A later cut includes all that an earlier one did."""
    lost = before.state - made.state
    assert not lost, f"monotone: parts {lost} are not included, which the cut before had"


def check_atomic(world: World, made: Made) -> None:
    """A transaction is included on all its nodes or on none, and only if it is committed."""
    state, parts = made.state, world.parts
    for number in state:
        one = parts[number].transaction
        assert one.fate == "committed", f"atomic: transaction {one.number} is included and {one.fate}"
        if one.gid is not None:
            missing = one.numbers - state
            assert not missing, f"atomic: of transaction {one.number} part {number} is included and not {missing}"


def check_causal(world: World, made: Made) -> None:
    """Whatever an included part read or overwrote is included."""
    state, parts = made.state, world.parts
    for number in state:
        missing = parts[number].saw - state
        assert not missing, f"causal: part {number} is included and not {missing}, whose rows it saw"


def check_positions(world: World, made: Made) -> None:
    """A position is between the markers, and all that was over before it is included."""
    positions = [cut.position for cut in made.nodes]
    for node, position in enumerate(positions):
        assert made.wave.starts[node] <= position <= made.wave.finishes[node], "a position outside the markers"
    for part in world.parts:
        if part.settled is not None and part.settled < positions[part.node]:
            assert part.number in made.state, f"complete: part {part.number} was over before the cut"


def check_carried(world: World, made: Made, tally: Counter[str]) -> None:
    """What is prepared before the cut is included, rolled back or named as undecided, whenever it was prepared."""
    positions = [cut.position for cut in made.nodes]
    # Those of which any part is committed before the cut's position there.
    decided = {
        part.transaction.number
        for part in world.parts
        if part.settled is not None and part.settled < positions[part.node]
    }
    expected: list[list[Undecided]] = [[] for _ in positions]
    for part in world.parts:
        one, node = part.transaction, part.node
        if one.gid is None or part.lsn is None or part.lsn >= positions[node]:
            continue
        if one.number in decided:
            assert part.number in made.state, f"carry: part {part.number} is committed and not included"
            continue
        assert part.number not in made.state, f"carry: part {part.number} is included and not decided"
        if part.undone_end is None or part.undone_end > made.wave.finishes[node]:
            expected[node].append(Undecided(one.gid, Lsn(part.lsn), Lsn(part.end)))
    for node, cut in enumerate(made.nodes):
        if cut.undecided or expected[node]:
            assert sorted(cut.undecided, key=by_lsn) == sorted(expected[node], key=by_lsn), "carry: others are named"
            tally["undecided"] += len(expected[node])
        tally["raised"] += cut.position > made.wave.starts[node]


def by_lsn(one: Undecided) -> int:
    """Where it was prepared."""
    return one.lsn


def count_entered(world: World, made: Made, before: Made | None, counted: Counter[str]) -> None:
    """Count what came into the state of one fleet with a cut; its local transactions are counted right."""
    entered = [world.parts[number] for number in (made.state - before.state if before else made.state)]
    local = sum(part.transaction.gid is None for part in entered)
    assert local == sum(cut.local_transactions for cut in made.nodes), "local transactions are counted wrong"
    distributed = {part.transaction.number: part.transaction for part in entered if part.transaction.gid is not None}
    counted["distributed"] += len(distributed)
    for one in distributed.values():
        counted["early"] += is_early(one, made)
        counted["with two branches on a node"] += len({part.node for part in one.parts}) < len(one.parts)
        tagged = one.coordinator
        if tagged:
            counted["tagged"] += 1
            is_raised_to = tagged.lsn is not None and tagged.lsn >= made.wave.starts[tagged.node]
            counted["raised to a tagged commit"] += is_raised_to


def check_counts(cut: Cut, counted: Counter[str]) -> None:
    """Transactions are counted once, whatever they are."""
    assert cut.global_transactions == counted["distributed"], "global transactions are counted wrong"
    assert cut.included_early == counted["early"], "early ones are counted wrong"


def is_early(one: Transaction, made: Made) -> bool:
    """Whether an included transaction is on some node committed in no branch before the cut."""
    nodes = made.nodes
    over = {part.node for part in one.parts if part.settled is not None and part.settled < nodes[part.node].position}
    return any(part.node not in over for part in one.parts)


def in_doubt(part: Part) -> bool:
    """Whether a part is prepared and nobody will ever settle it."""
    return part.lsn is not None and part.settled is None and part.undone_end is None


def carried_over(world: World, made: Sequence[Made]) -> int:
    """How many parts two cuts or more left out that a later one included."""
    named = Counter((node, each.lsn) for one in made for node, cut in enumerate(one.nodes) for each in cut.undecided)
    last = made[-1].state
    return sum(part.lsn is not None and named[part.node, part.lsn] >= 2 and part.number in last for part in world.parts)


def check_order(worlds: Sequence[World], made: Sequence[Sequence[Made]]) -> None:
    """Folding gives of every row the value of its last included writer, and every appended line once.

    Every node at every cut is a group of its own.
    """
    groups = [changes for cuts in made for one in cuts for changes in one.changes]
    folded = fold(groups)
    group = 0
    for world, cuts in zip(worlds, made, strict=True):
        chains = [chains_of(world, number) for number in range(len(world.nodes))]
        for one in cuts:
            for number, rows in enumerate(chains):
                for row, writers in enumerate(rows):
                    last = next((part for part in reversed(writers) if part in one.state), None)
                    found = folded.get((group, row))
                    assert found == last, f"order: row {row} of node {number} is {found}'s instead of {last}'s"
                group += 1


def chains_of(world: World, number: int) -> list[list[int]]:
    """Who wrote each row, in commit order; last, who committed elsewhere and holds it locked for ever."""
    found = world.nodes[number].chains
    for part in world.parts:
        if part.node == number and in_doubt(part) and part.transaction.fate == "committed":
            found = [[*writers, part.number] if row in part.writes else writers for row, writers in enumerate(found)]
    return found


def fold(changes: Sequence[list[tuple[int, int, int, int]]]) -> dict[tuple[int, int], int]:
    """The last part to write every row of every group, out of the groups' changes in any order."""
    sizes = [len(group) for group in changes]
    numbers = chain.from_iterable(chain.from_iterable(changes))
    lsn, seq, rows, parts = np.fromiter(numbers, np.int64, 4 * sum(sizes)).reshape(-1, 4).T
    groups = np.repeat(np.arange(len(sizes)), sizes)
    is_line = rows == APPENDED
    lines = np.stack([groups[is_line], parts[is_line]])
    assert np.unique(lines, axis=1).shape == lines.shape, "order: a node has a line several times"
    groups, lsn, seq, rows, parts = (column[~is_line] for column in (groups, lsn, seq, rows, parts))
    keys = BytesColumn(KEY_BYTES[rows], np.arange(len(rows) + 1))
    last = last_of_every_key(groups, keys, lsn, seq)
    found = list(zip(groups[last].tolist(), rows[last].tolist(), strict=True))
    assert len(found) == len(set(found))
    return dict(zip(found, parts[last].tolist(), strict=True))
