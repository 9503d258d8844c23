"""The cut rule on small cases that can be followed by hand; tests/simulation has the interleavings."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cutline.fleet.lsn import Lsn
from cutline.wal.cut.cut_values import Cut, NodeCut, Undecided
from cutline.wal.cut.resolve import GlobalIdReusedError, NodeWindow, resolve
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.unit.made_commits import MARKED_AT

# The op, the LSN of its record and its global id; every record is 10 bytes long. The LSN of an R is that of the
# PREPARE that it rolled back; its own comes fourth.
Event = tuple[str, int, str | None] | tuple[str, int, str | None, int]


def window(
    start: int, finish: int, *events: Event, previous: int = 0, undecided: tuple[Undecided, ...] = ()
) -> NodeWindow:
    rows = []
    for op, lsn, gid, *own in events:
        end = (own[0] if own else lsn) + 10
        rows.append(
            {
                "lsn": lsn + 10 if op == "R" else lsn, "end_lsn": end, "seq": 0, "xid": 0, "global_id": gid,
                "op": ord(op), "group": 0, "partition": -1, "key": b"", "row": b"",
            }
        )  # fmt: skip
    return NodeWindow(
        Lsn(previous), Lsn(start), Lsn(finish), pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), MARKED_AT, undecided
    )


def positions(cut: Cut) -> dict[str, int]:
    return {part.node: part.position for part in cut.nodes}


def part_of(cut: Cut, node: str) -> NodeCut:
    (found,) = [part for part in cut.nodes if part.node == node]
    return found


def test_a_quiet_fleet_is_cut_at_its_start_markers() -> None:
    cut = resolve({"a": window(100, 200), "b": window(300, 400)})
    assert positions(cut) == {"a": 100, "b": 300}
    assert cut.global_transactions == cut.included_early == cut.in_flight == 0


def test_a_commit_before_one_start_marker_includes_the_prepare_after_another() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 50, "g"), ("K", 80, "g")),
            "b": window(100, 200, ("C", 110, None), ("P", 120, "g"), ("C", 140, None)),
        }
    )
    assert positions(cut) == {"a": 100, "b": 130}
    assert part_of(cut, "b").undecided == ()
    assert part_of(cut, "b").local_transactions == 1
    assert (cut.global_transactions, cut.included_early, cut.in_flight) == (1, 1, 1)


def test_raising_one_position_can_raise_others() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 50, "g"), ("K", 80, "g"), ("P", 150, "i")),
            "b": window(100, 200, ("P", 60, "h"), ("K", 110, "h"), ("P", 120, "g")),
            "c": window(100, 200, ("P", 130, "h"), ("P", 140, "i"), ("P", 160, "z")),
        }
    )
    # g raises b past h's commit there, and h raises c; i is committed nowhere.
    assert positions(cut) == {"a": 100, "b": 130, "c": 140}
    assert cut.global_transactions == 2
    assert [entry.global_id for entry in part_of(cut, "c").undecided] == []


def test_a_transaction_committed_nowhere_is_undecided() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 50, "g"), ("K", 120, "g")),
            "b": window(100, 200, ("P", 60, "g"), ("P", 100, "h")),
        }
    )
    # The PREPARE of h begins at the cut, so it is not before the cut.
    assert positions(cut) == {"a": 100, "b": 100}
    assert part_of(cut, "a").undecided == (Undecided("g", Lsn(50), Lsn(60)),)
    assert part_of(cut, "b").undecided == (Undecided("g", Lsn(60), Lsn(70)),)
    assert cut.global_transactions == 0
    assert cut.in_flight == 1


def test_an_undecided_transaction_is_included_once_it_is_committed_anywhere() -> None:
    undecided = (Undecided("g", Lsn(50), Lsn(60)),)
    cut = resolve(
        {
            "a": window(300, 400, ("K", 250, "g"), previous=200, undecided=undecided),
            "b": window(300, 400, previous=200, undecided=undecided),
        }
    )
    assert positions(cut) == {"a": 300, "b": 300}
    assert part_of(cut, "a").undecided == part_of(cut, "b").undecided == ()
    assert (cut.global_transactions, cut.included_early) == (1, 1)


def test_an_undecided_transaction_that_is_rolled_back_is_never_included() -> None:
    cut = resolve(
        {"a": window(300, 400, ("R", 50, "g", 250), previous=200, undecided=(Undecided("g", Lsn(50), Lsn(60)),))}
    )
    assert part_of(cut, "a").undecided == ()
    assert part_of(cut, "a").rolled_back == (50,)
    assert cut.global_transactions == 0


def test_events_before_the_window_belong_to_the_previous_cut() -> None:
    cut = resolve(
        {
            "a": window(300, 400, ("C", 190, None), ("P", 180, "g"), ("K", 190, "g"), ("C", 200, None), previous=200),
            "b": window(300, 400, ("P", 310, "g"), previous=200),
        }
    )
    assert part_of(cut, "a").local_transactions == 1
    assert positions(cut) == {"a": 300, "b": 300}


def test_a_rolled_back_transaction_stays_excluded_when_its_gid_is_reused() -> None:
    cut = resolve(
        {
            "a": window(200, 300, ("P", 50, "g"), ("R", 50, "g", 70), ("P", 110, "g"), ("K", 130, "g")),
            "b": window(200, 300, ("P", 40, "g"), ("R", 40, "g", 80), ("P", 210, "g")),
            # The second transaction has no part here, and the first must not raise the position.
            "c": window(200, 300, ("P", 250, "g"), ("R", 250, "g", 270)),
        }
    )
    assert positions(cut) == {"a": 200, "b": 220, "c": 200}
    assert part_of(cut, "a").rolled_back == (50,)
    assert part_of(cut, "b").rolled_back == (40,)
    assert cut.global_transactions == 1


def test_a_reused_gid_is_refused_if_it_is_ambiguous() -> None:
    used = [("P", 50, "g"), ("K", 70, "g"), ("P", 90, "g")]
    with pytest.raises(GlobalIdReusedError, match="'g'"):
        resolve({"a": window(100, 200, *used)})
    with pytest.raises(GlobalIdReusedError):
        resolve({"a": window(150, 200, *used, ("K", 160, "g")), "b": window(100, 200)})
    # Included early in the previous cut, committed here after it, and reused.
    with pytest.raises(GlobalIdReusedError):
        resolve({"a": window(100, 200, ("K", 70, "g"), ("P", 90, "g"), previous=60)})


def test_a_gid_may_be_reused_if_all_its_uses_are_over() -> None:
    uses = [("P", 20, "g"), ("K", 40, "g"), ("P", 50, "g"), ("K", 70, "g")]
    cut = resolve({"a": window(100, 200, *uses), "b": window(100, 200, *uses)})
    assert positions(cut) == {"a": 100, "b": 100}


def test_the_branches_of_one_transaction_on_one_node_are_not_a_reuse() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 20, "g"), ("P", 40, "g"), ("K", 90, "g"), ("K", 110, "g")),
            "b": window(100, 200, ("P", 120, "g"), ("P", 140, "g")),
        }
    )
    assert positions(cut) == {"a": 100, "b": 150}
    assert cut.global_transactions == 1


def test_a_one_phase_commit_with_a_global_id_includes_what_other_nodes_prepared() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("C", 80, "g")),
            "b": window(100, 200, ("C", 110, None), ("P", 120, "g"), ("C", 140, None)),
        }
    )
    assert positions(cut) == {"a": 100, "b": 130}
    assert part_of(cut, "b").undecided == ()
    # It counts as a global transaction, not as a local one.
    assert [part.local_transactions for part in cut.nodes] == [0, 1]
    assert (cut.global_transactions, cut.included_early, cut.in_flight) == (1, 1, 1)


def test_a_commit_elsewhere_raises_a_position_to_the_end_of_the_one_phase_commit() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 110, "h"), ("K", 115, "i"), ("C", 120, "g"), ("C", 140, None)),
            "b": window(100, 200, ("P", 50, "g"), ("K", 90, "g")),
            "c": window(100, 200, ("P", 150, "i")),
        }
    )
    # That raises c in turn: i is committed on a before the raised position.
    assert positions(cut) == {"a": 130, "b": 100, "c": 160}
    assert part_of(cut, "a").undecided == (Undecided("h", Lsn(110), Lsn(120)),)
    assert cut.global_transactions == 2


def test_a_one_phase_commit_after_the_cut_is_neither_in_it_nor_undecided() -> None:
    cut = resolve(
        {"a": window(100, 200, ("C", 100, "g")), "b": window(100, 200, ("P", 50, "g")), "c": window(100, 200)}
    )
    assert positions(cut) == {"a": 100, "b": 100, "c": 100}
    assert part_of(cut, "a").undecided == ()
    assert part_of(cut, "b").undecided == (Undecided("g", Lsn(50), Lsn(60)),)
    assert (cut.global_transactions, cut.in_flight) == (0, 1)
    assert [part.local_transactions for part in cut.nodes] == [0, 0, 0]
    later = resolve(
        {
            "a": window(300, 400, ("C", 100, "g"), previous=100),
            "b": window(300, 400, ("P", 50, "g"), previous=100, undecided=part_of(cut, "b").undecided),
            "c": window(300, 400, previous=100),
        }
    )
    assert part_of(later, "b").undecided == ()
    assert (later.global_transactions, later.included_early) == (1, 1)


def test_a_one_phase_commit_alone_counts_as_one_global_transaction() -> None:
    cut = resolve({"a": window(100, 200, ("C", 50, "g"), ("C", 60, None)), "b": window(100, 200)})
    assert part_of(cut, "a").local_transactions == 1
    assert (cut.global_transactions, cut.included_early, cut.in_flight) == (1, 0, 0)


def test_a_branch_prepared_beside_a_one_phase_commit_is_not_a_reuse() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 20, "g"), ("C", 60, "g"), ("K", 110, "g")),
            "b": window(100, 200, ("P", 30, "g")),
        }
    )
    assert part_of(cut, "a").undecided == part_of(cut, "b").undecided == ()
    assert cut.global_transactions == 1


def test_a_gid_of_a_one_phase_commit_must_not_be_reused_across_a_cut() -> None:
    for again in ("C", "P"):
        with pytest.raises(GlobalIdReusedError, match="'g'"):
            resolve({"a": window(100, 200, ("C", 50, "g"), (again, 120, "g"))})
    with pytest.raises(GlobalIdReusedError, match="'g'"):
        resolve({"a": window(100, 200, ("P", 20, "g"), ("K", 40, "g"), ("C", 120, "g"))})
    over = resolve({"a": window(100, 200, ("C", 50, "g"), ("C", 70, "g"))})
    assert positions(over) == {"a": 100}


def test_an_empty_fleet_has_an_empty_cut() -> None:
    assert resolve({}) == Cut((), 0, 0, 0)
