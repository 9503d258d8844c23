"""The promises of docs/consistency.md, asserted on every cut of the model's histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from cutline.columns.bytes_column import BytesColumn
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.changes import last_of_every_key
from cutline.wal.cut.cut_values import Cut, Undecided
from tests.simulation.fleet_model import World
from tests.simulation.fleet_records import APPENDED, ROWS_PER_NODE, Part, Transaction
from tests.simulation.made_cuts import ResolvedCut, in_doubt_for_next, included_in_doubt, resolve_cuts

# One key of one byte per row.
KEY_BYTES = np.arange(ROWS_PER_NODE, dtype=np.uint8)


def check_histories(worlds: Sequence[World]) -> Counter[str]:
    """Assert every promise on every cut of several fleets; return how often each case occurred."""
    tally: Counter[str] = Counter(histories=len(worlds), reused_gids=sum(world.reused_gids for world in worlds))
    resolved: list[list[ResolvedCut]] = []
    for cut, cuts in resolve_cuts(worlds):
        counted: Counter[str] = Counter()
        for number, (world, one) in enumerate(zip(worlds, cuts, strict=True)):
            previous = resolved[-1][number] if resolved else None
            if previous:
                check_monotone(world, one, previous)
            check_atomic(world, one)
            check_causal(world, one)
            check_positions(world, one)
            check_undecided(world, one, tally)
            check_in_doubt(world, one, tally)
            check_ddl(world, one, tally)
            count_added(world, one, previous, counted)
        check_counts(cut, counted)
        tally += counted
        resolved.append(cuts)
    by_world = list(zip(*resolved, strict=True))
    check_order(worlds, by_world)
    tally["cuts"] += sum(map(len, by_world))
    for world, cuts_of_world in zip(worlds, by_world, strict=True):
        tally["in doubt for ever"] += sum(is_in_doubt(part) for part in world.parts)
        tally["undecided at two cuts"] += count_undecided_twice(world, cuts_of_world)
    return tally


def check_monotone(world: World, resolved: ResolvedCut, previous: ResolvedCut) -> None:
    """Assert that a cut includes everything that the previous one did."""
    lost = previous.state - resolved.state
    assert not lost, f"monotone: parts {lost} are in the previous cut and not in this one"


def check_atomic(world: World, resolved: ResolvedCut) -> None:
    """Assert that a transaction is included on all its nodes or on none, and only if it is committed."""
    state, parts = resolved.state, world.parts
    for number in state:
        one = parts[number].transaction
        assert one.fate == "committed", f"atomic: transaction {one.number} is included and {one.fate}"
        if one.gid is not None:
            missing = one.numbers - state
            assert not missing, f"atomic: transaction {one.number}: part {number} is included, {missing} are not"


def check_causal(world: World, resolved: ResolvedCut) -> None:
    """Assert that everything that an included part read or overwrote is included."""
    state, parts = resolved.state, world.parts
    for number in state:
        missing = parts[number].saw - state
        assert not missing, f"causal: part {number} is included, {missing}, whose rows it saw, are not"


def check_positions(world: World, resolved: ResolvedCut) -> None:
    """Assert that positions lie between the markers, and that everything committed before them is included."""
    positions = [cut.position for cut in resolved.nodes]
    for node, position in enumerate(positions):
        assert resolved.wave.starts[node] <= position <= resolved.wave.finishes[node], (
            "a position is outside the markers"
        )
    for part in world.parts:
        if part.commit_lsn is not None and part.commit_lsn < positions[part.node]:
            assert part.number in resolved.state, f"complete: part {part.number} was committed before the cut"


def check_undecided(world: World, resolved: ResolvedCut, tally: Counter[str]) -> None:
    """Assert that a transaction prepared before the cut, however long before, is included, undecided or rolled back."""
    positions = [cut.position for cut in resolved.nodes]
    # A part is committed before the cut's position on its node.
    decided = {
        part.transaction.number
        for part in world.parts
        if part.commit_lsn is not None and part.commit_lsn < positions[part.node]
    }
    expected: list[list[Undecided]] = [[] for _ in positions]
    for part in world.parts:
        one, node = part.transaction, part.node
        if one.gid is None or part.lsn is None or part.lsn >= positions[node]:
            continue
        if one.number in decided:
            assert part.number in resolved.state, f"undecided: part {part.number} is committed and not included"
            continue
        assert part.number not in resolved.state, f"undecided: part {part.number} is included and not decided"
        if part.rollback_end is None or part.rollback_end > resolved.wave.finishes[node]:
            expected[node].append(Undecided(one.gid, Lsn(part.lsn), Lsn(part.end)))
    for node, cut in enumerate(resolved.nodes):
        if cut.undecided or expected[node]:
            assert sorted(cut.undecided, key=by_lsn) == sorted(expected[node], key=by_lsn), "undecided: wrong list"
            tally["undecided"] += len(expected[node])
        tally["raised"] += cut.position > resolved.wave.starts[node]


def check_in_doubt(world: World, resolved: ResolvedCut, tally: Counter[str]) -> None:
    """Assert that a server recovered to its position has the prepared transactions that the cut lists.

    Of a transaction that is prepared anywhere, the parts that are committed before the cut are listed too.
    """
    nodes = resolved.nodes
    prepared = {part.number for part in world.parts if is_prepared_at(part, nodes[part.node].position)}
    open_numbers = {world.parts[number].transaction.number for number in prepared}
    expected: list[list[tuple[int, bool, bool]]] = [[] for _ in nodes]
    for part in world.parts:
        is_over = part.commit_lsn is not None and part.commit_lsn < nodes[part.node].position
        if part.number in prepared or (is_over and part.transaction.number in open_numbers):
            expected[part.node].append((part.number, part.number in prepared, part.number in resolved.state))
    for cut, parts in zip(nodes, expected, strict=True):
        found = [(one.xid, one.is_prepared, one.is_included) for one in in_doubt_for_next(cut)]
        assert sorted(found) == sorted(parts), "in doubt: wrong list"
        tally["prepared at a cut"] += len(found)
        tally["included and prepared"] += sum(one[1] and one[2] for one in found)


def check_ddl(world: World, resolved: ResolvedCut, tally: Counter[str]) -> None:
    """Assert that the catalogs that belong to a cut show the DDL of what it includes, and no other DDL.

    Those of a cut that is not taken may show anything: the catalogs changed meanwhile, or it awaits their change.
    """
    wave = resolved.wave
    included = included_in_doubt(resolved.nodes)
    awaited = {number for numbers in included.values() for number in numbers if world.parts[number].has_ddl}
    if awaited & wave.prepared:
        tally["awaits DDL"] += 1
        return
    if wave.catalogs != wave.catalogs_before:
        tally["catalogs changed"] += 1
        return
    expected = {number for number in resolved.state if world.parts[number].has_ddl}
    assert wave.catalogs == expected, f"whole: the DDL of parts {expected ^ wave.catalogs} is included by half"
    tally["with DDL in doubt"] += any(
        world.parts[number].has_ddl and number not in resolved.state for number in wave.prepared
    )


def is_prepared_at(part: Part, position: int) -> bool:
    """Whether a server that is recovered to the position has the part as a prepared transaction."""
    if part is part.transaction.coordinator or part.transaction.gid is None or part.lsn is None:
        return False
    is_decided = (part.commit_lsn is not None and part.commit_lsn < position) or (
        part.rollback_end is not None and part.rollback_end <= position
    )
    return part.lsn < position and not is_decided


def by_lsn(one: Undecided) -> int:
    """The position of its PREPARE."""
    return one.lsn


def count_added(world: World, resolved: ResolvedCut, previous: ResolvedCut | None, counted: Counter[str]) -> None:
    """Count what a cut adds to the state of one fleet; assert that the cut has the right count of local ones."""
    added = [world.parts[number] for number in (resolved.state - previous.state if previous else resolved.state)]
    local = sum(part.transaction.gid is None for part in added)
    assert local == sum(cut.local_transactions for cut in resolved.nodes), "wrong count of local transactions"
    distributed = {part.transaction.number: part.transaction for part in added if part.transaction.gid is not None}
    counted["distributed"] += len(distributed)
    for one in distributed.values():
        counted["early"] += is_included_early(one, resolved)
        counted["with two branches on a node"] += len({part.node for part in one.parts}) < len(one.parts)
        tagged = one.coordinator
        if tagged:
            counted["tagged"] += 1
            is_raised_to = tagged.lsn is not None and tagged.lsn >= resolved.wave.starts[tagged.node]
            counted["raised to a tagged commit"] += is_raised_to


def check_counts(cut: Cut, counted: Counter[str]) -> None:
    """Assert that every global transaction is counted once."""
    assert cut.global_transactions == counted["distributed"], "wrong count of global transactions"
    assert cut.included_early == counted["early"], "wrong count of transactions included early"


def is_included_early(one: Transaction, resolved: ResolvedCut) -> bool:
    """Whether some node of an included transaction has committed none of its branches before the cut."""
    nodes = resolved.nodes
    over = {
        part.node for part in one.parts if part.commit_lsn is not None and part.commit_lsn < nodes[part.node].position
    }
    return any(part.node not in over for part in one.parts)


def is_in_doubt(part: Part) -> bool:
    """Whether the part is prepared and never decided."""
    return part.lsn is not None and part.commit_lsn is None and part.rollback_end is None


def count_undecided_twice(world: World, resolved: Sequence[ResolvedCut]) -> int:
    """How many parts were undecided at two or more cuts, and are included in a later one."""
    named = Counter(
        (node, each.lsn) for one in resolved for node, cut in enumerate(one.nodes) for each in cut.undecided
    )
    last = resolved[-1].state
    return sum(part.lsn is not None and named[part.node, part.lsn] >= 2 and part.number in last for part in world.parts)


def check_order(worlds: Sequence[World], resolved: Sequence[Sequence[ResolvedCut]]) -> None:
    """Assert that folding gives every row the value of its last included writer, and every appended line once.

    Every node at every cut is folded as a separate group.
    """
    groups = [changes for cuts in resolved for one in cuts for changes in one.changes]
    folded = fold(groups)
    group = 0
    for world, cuts in zip(worlds, resolved, strict=True):
        writers_by_node = [row_writers(world, number) for number in range(len(world.nodes))]
        for one in cuts:
            for number, rows in enumerate(writers_by_node):
                for row, writers in enumerate(rows):
                    last = next((part for part in reversed(writers) if part in one.state), None)
                    found = folded.get((group, row))
                    assert found == last, f"ordered: row {row} of node {number} is {found}'s, not {last}'s"
                group += 1


def row_writers(world: World, number: int) -> list[list[int]]:
    """The writers of each row in commit order; last, one that is committed elsewhere and locks the row for ever."""
    found = world.nodes[number].writers
    for part in world.parts:
        if part.node == number and is_in_doubt(part) and part.transaction.fate == "committed":
            found = [[*writers, part.number] if row in part.writes else writers for row, writers in enumerate(found)]
    return found


def fold(changes: Sequence[list[tuple[int, int, int, int]]]) -> dict[tuple[int, int], int]:
    """The last writer of every row of every group; the groups' changes may be in any order."""
    sizes = [len(group) for group in changes]
    numbers = chain.from_iterable(chain.from_iterable(changes))
    lsn, seq, rows, parts = np.fromiter(numbers, np.int64, 4 * sum(sizes)).reshape(-1, 4).T
    groups = np.repeat(np.arange(len(sizes)), sizes)
    is_line = rows == APPENDED
    lines = np.stack([groups[is_line], parts[is_line]])
    assert np.unique(lines, axis=1).shape == lines.shape, "ordered: a node has a line several times"
    groups, lsn, seq, rows, parts = (column[~is_line] for column in (groups, lsn, seq, rows, parts))
    keys = BytesColumn(KEY_BYTES[rows], np.arange(len(rows) + 1))
    last = last_of_every_key(groups, keys, lsn, seq)
    found = list(zip(groups[last].tolist(), rows[last].tolist(), strict=True))
    assert len(found) == len(set(found))
    return dict(zip(found, parts[last].tolist(), strict=True))
