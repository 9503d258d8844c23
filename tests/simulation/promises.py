"""What docs/consistency.md promises of every cut, asserted on all cuts of a history of the model.

What a cut's state is, is worked out from `resolve`'s answers alone, as a restore does it: change records before
the node's position, but for the transactions that the cut or an earlier one left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from columns.bytes_column import BytesColumn
from fleet.lsn import Lsn
from snapshots.fold.superseding import last_of_every_key
from tests.simulation.fleet_model import World
from tests.simulation.fleet_records import ROWS_PER_NODE, WAL_BEGIN, Change, Node, Part, Transaction, Wave
from wal.cut import resolve as rule
from wal.cut.cut_events import NodeWindow
from wal.cut.cut_values import Cut, NodeCut, Undecided
from wal.segments.segment_schema import SEGMENT_SCHEMA

BASE_POSITION = WAL_BEGIN - 100
ROW_LIMIT = 4096
ZEROS = {name: pa.array([0] * ROW_LIMIT, SEGMENT_SCHEMA.field(name).type) for name in ("seq", "xid", "group")}
ZEROS |= {"partition": pa.array([0] * ROW_LIMIT, pa.int32()), "key": pa.array([b""] * ROW_LIMIT, pa.binary())}
# Keys of one byte, one after the other.
KEY_BYTES = np.arange(ROWS_PER_NODE, dtype=np.uint8)


@dataclass(slots=True)
class Made:
    """One cut of a history; `changes` and `state` (its parts) by node, as a restore makes them."""

    wave: Wave
    cut: Cut
    changes: dict[int, list[Change]]
    state: dict[int, set[int]]

    def of(self, node: int) -> NodeCut:
        """The cut's part of one node."""
        return self.cut.nodes[node]


def events_table(node: Node) -> pa.Table:
    """All events of a node in SEGMENT_SCHEMA."""
    size = len(node.op)
    columns = {name: zeros.slice(0, size) for name, zeros in ZEROS.items()}
    columns["lsn"], columns["end_lsn"] = pa.array(node.lsn, pa.int64()), pa.array(node.ends, pa.int64())
    columns["op"], columns["global_id"] = pa.array(node.op, pa.int8()), pa.array(node.gid, pa.string())
    columns["row"] = columns["key"]
    return pa.Table.from_arrays([columns[name] for name in SEGMENT_SCHEMA.names], schema=SEGMENT_SCHEMA)


def decoded_until(wave: Wave, node: int) -> int:
    """How far the WAL of a node is decoded for a cut."""
    return wave.finishes[node]


def carried(cut: NodeCut) -> tuple[Undecided, ...]:
    """What the next cut is told of the transactions that this one left out."""
    return cut.undecided


def effective(world: World, node: int, cut: NodeCut, excluded: set[int], before: Made | None) -> list[Change]:
    """The changes of a node that belong to a state; `before` is the cut before."""
    return [one for one in world.nodes[node].changes if one.lsn < cut.position and one.lsn not in excluded]


def cuts_of(world: World) -> Iterator[Made]:
    """Resolve all cuts of a history in a row; each gets the events since the last, and some before."""
    position = dict.fromkeys(range(len(world.nodes)), BASE_POSITION)
    undecided: Mapping[int, tuple[Undecided, ...]] = dict.fromkeys(position, ())
    never: dict[int, set[int]] = {node: set() for node in position}
    tables = [events_table(node) for node in world.nodes]
    before: Made | None = None
    for wave in world.waves:
        windows = {}
        for number, node in enumerate(world.nodes):
            # A segment begins anywhere before the window does, and may reach back a long way.
            since = position[number] - wave.reach[number]
            until = decoded_until(wave, number)
            first, last = bisect_right(node.ends, since), bisect_right(node.ends, until)
            events = tables[number].slice(first, last - first)
            windows[str(number)] = NodeWindow(
                Lsn(position[number]), Lsn(wave.starts[number]), Lsn(until), events, undecided[number]
            )
        cut = rule.resolve(windows)
        assert [part.node for part in cut.nodes] == list(windows)
        changes: dict[int, list[Change]] = {}
        for number in position:
            part = cut.nodes[number]
            never[number].update(part.rolled_back)
            excluded = never[number] | {one.lsn for one in part.undecided}
            changes[number] = effective(world, number, part, excluded, before)
        before = Made(wave, cut, changes, {number: {one.part for one in found} for number, found in changes.items()})
        position = {number: cut.nodes[number].position for number in position}
        undecided = {number: carried(cut.nodes[number]) for number in position}
        yield before


def check_history(world: World) -> Counter[str]:
    """Assert every promise on every cut; return what there was in the history to be checked."""
    made: list[Made] = []
    tally: Counter[str] = Counter(histories=1, reused_gids=world.reused_gids)
    for one in cuts_of(world):
        if made:
            check_monotone(one, made[-1])
        check_atomic(world, one)
        check_causal(world, one)
        for number in range(len(world.nodes)):
            check_position(world, one, number)
            check_carried(world, one, number, tally)
        check_counts(world, one, made[-1] if made else None, tally)
        made.append(one)
    check_order(world, made)
    tally["cuts"] += len(made)
    tally["in doubt for ever"] += sum(in_doubt(part) for part in world.parts)
    tally["carried over two cuts"] += sum(carried_over(part, made) for part in world.parts)
    return tally


def check_monotone(made: Made, before: Made) -> None:
    """A later cut includes all that an earlier one did."""
    for node, state in before.state.items():
        lost = state - made.state[node]
        assert not lost, f"monotone: node {node} lacks {lost}, which the cut before had"


def check_atomic(world: World, made: Made) -> None:
    """A transaction is included on all its nodes or on none, and only if it is committed."""
    for state in made.state.values():
        for number in state:
            one = world.parts[number].transaction
            assert one.fate == "committed", f"atomic: transaction {one.number} is included and {one.fate}"
            for part in one.parts:
                assert part.number in made.state[part.node], (
                    f"atomic: transaction {one.number} is on node {world.parts[number].node} and not on {part.node}"
                )


def check_causal(world: World, made: Made) -> None:
    """Whatever an included part read or overwrote is included."""
    for node, state in made.state.items():
        for number in state:
            missing = world.parts[number].saw - state
            assert not missing, f"causal: node {node} has part {number} and not {missing}, whose rows it saw"


def check_position(world: World, made: Made, node: int) -> None:
    """A position is between the markers, and all that was over before it is included."""
    position = made.of(node).position
    assert made.wave.starts[node] <= position <= made.wave.finishes[node], "a position outside the markers"
    for part in world.parts:
        if part.node == node and part.settled is not None and part.settled < position:
            assert part.number in made.state[node], f"complete: part {part.number} was over before the cut"


def is_decided(one: Transaction, made: Made) -> bool:
    """Whether any part of a transaction is committed before the cut's position there."""
    return any(part.settled is not None and part.settled < made.of(part.node).position for part in one.parts)


def check_carried(world: World, made: Made, node: int, tally: Counter[str]) -> None:
    """What is prepared before the cut is included, rolled back or named as undecided, whenever it was prepared."""
    cut = made.of(node)
    expected = []
    for part in world.parts:
        if part.node != node or part.lsn is None or part.lsn >= cut.position or part.transaction.gid is None:
            continue
        if is_decided(part.transaction, made):
            assert part.number in made.state[node], f"carry: part {part.number} is committed and not included"
            continue
        assert part.number not in made.state[node], f"carry: part {part.number} is included and not decided"
        if part.undone_end is None or part.undone_end > made.wave.finishes[node]:
            expected.append(Undecided(part.transaction.gid, Lsn(part.lsn), Lsn(part.end)))
    assert sorted(cut.undecided, key=lambda one: one.lsn) == sorted(expected, key=lambda one: one.lsn), "carry"
    tally["undecided"] += len(expected)
    tally["raised"] += cut.position > made.wave.starts[node]


def check_counts(world: World, made: Made, before: Made | None, tally: Counter[str]) -> None:
    """Transactions are counted once, whatever they are."""
    entered = {
        number for node, state in made.state.items() for number in (state - before.state[node] if before else state)
    }
    parts = [world.parts[number] for number in sorted(entered)]
    distributed = {part.transaction.number: part.transaction for part in parts if part.transaction.gid is not None}
    early = sum(is_early(one, made) for one in distributed.values())
    local = sum(part.local_transactions for part in made.cut.nodes)
    assert local == sum(part.transaction.gid is None for part in parts), "local transactions are counted wrong"
    assert made.cut.global_transactions == len(distributed), "global transactions are counted wrong"
    assert made.cut.included_early == early, "early ones are counted wrong"
    tally["early"] += early
    tally["tagged"] += sum(one.coordinator is not None for one in distributed.values())
    tally["raised to a tagged commit"] += sum(
        part is one.coordinator and part.lsn is not None and part.lsn >= made.wave.starts[part.node]
        for one in distributed.values()
        for part in one.parts
    )
    tally["with two branches on a node"] += sum(
        len({part.node for part in one.parts}) < len(one.parts) for one in distributed.values()
    )


def is_early(one: Transaction, made: Made) -> bool:
    """Whether an included transaction is on some node committed in no branch before the cut."""
    over = {part.node for part in one.parts if part.settled is not None and part.settled < made.of(part.node).position}
    return any(part.node not in over for part in one.parts)


def in_doubt(part: Part) -> bool:
    """Whether a part is prepared and nobody will ever settle it."""
    return part.lsn is not None and part.settled is None and part.undone_end is None


def carried_over(part: Part, made: list[Made]) -> bool:
    """Whether two cuts or more left out a part that a later one included."""
    is_in = [part.number in one.state[part.node] for one in made]
    named = sum(any(each.lsn == part.lsn for each in one.of(part.node).undecided) for one in made)
    return is_in[-1] and named >= 2


def check_order(world: World, made: list[Made]) -> None:
    """Folding gives of every row the value of its last included writer, and every appended line once."""
    columns: list[tuple[int, int, int, int, int]] = []
    for step, one in enumerate(made):
        for node, changes in one.changes.items():
            lines = Counter(change.part for change in changes if change.row is None)
            assert all(times == 1 for times in lines.values()), f"order: node {node} has a line several times"
            group = step * len(world.nodes) + node
            columns += [(group, c.lsn, c.seq, c.row, c.part) for c in changes if c.row is not None]
    folded = fold(columns)
    for step, one in enumerate(made):
        for number in range(len(world.nodes)):
            for row, chain in enumerate(chains_of(world, number)):
                last = next((part for part in reversed(chain) if part in one.state[number]), None)
                found = folded.get((step * len(world.nodes) + number, row))
                assert found == last, f"order: row {row} of node {number} is {found}'s instead of {last}'s"


def chains_of(world: World, number: int) -> list[list[int]]:
    """Who wrote each row, in commit order; last, who committed elsewhere and holds it locked for ever."""
    found = world.nodes[number].chains
    for part in world.parts:
        if part.node == number and in_doubt(part) and part.transaction.fate == "committed":
            found = [[*chain, part.number] if row in part.writes else chain for row, chain in enumerate(found)]
    return found


def fold(columns: list[tuple[int, int, int, int, int]]) -> dict[tuple[int, int], int]:
    """The last part to write every (group, row), out of (group, lsn, seq, row, part) in any order."""
    if not columns:
        return {}
    groups, lsn, seq, rows, parts = np.array(columns, np.int64).T
    keys = BytesColumn(KEY_BYTES[rows], np.arange(len(rows) + 1))
    last = last_of_every_key(groups, keys, lsn, seq)
    found = list(zip(groups[last].tolist(), rows[last].tolist(), strict=True))
    assert len(found) == len(set(found))
    return dict(zip(found, parts[last].tolist(), strict=True))
