"""The cut rule on small cases that can be followed by hand; tests/simulation has the interleavings."""

from __future__ import annotations

import pyarrow as pa
import pytest

from fleet.lsn import Lsn
from wal.cut.cut_values import Cut, NodeCut, Undecided
from wal.cut.resolve import GlobalIdReusedError, NodeWindow, resolve
from wal.segments.segment_schema import SEGMENT_SCHEMA

# op, where its record begins, its global id; every record is 10 long. Of an R the second is the beginning of
# the PREPARE that it undid, and a fourth its own.
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
        Lsn(previous), Lsn(start), Lsn(finish), pa.Table.from_pylist(rows, schema=SEGMENT_SCHEMA), undecided
    )


def positions(cut: Cut) -> dict[str, int]:
    return {part.node: part.position for part in cut.nodes}


def of(cut: Cut, node: str) -> NodeCut:
    (found,) = [part for part in cut.nodes if part.node == node]
    return found


def test_a_quiet_fleet_is_cut_at_its_start_markers() -> None:
    cut = resolve({"a": window(100, 200), "b": window(300, 400)})
    assert positions(cut) == {"a": 100, "b": 300}
    assert cut.global_transactions == cut.included_early == cut.in_flight == 0


def test_a_commit_before_one_start_brings_in_the_prepare_after_another() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 50, "g"), ("K", 80, "g")),
            "b": window(100, 200, ("C", 110, None), ("P", 120, "g"), ("C", 140, None)),
        }
    )
    assert positions(cut) == {"a": 100, "b": 130}
    assert of(cut, "b").undecided == ()
    assert of(cut, "b").local_transactions == 1
    assert (cut.global_transactions, cut.included_early, cut.in_flight) == (1, 1, 1)


def test_a_raised_position_raises_others_in_turn() -> None:
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
    assert [entry.global_id for entry in of(cut, "c").undecided] == []


def test_what_nobody_committed_is_left_out_and_named() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 50, "g"), ("K", 120, "g")),
            "b": window(100, 200, ("P", 60, "g"), ("P", 100, "h")),
        }
    )
    # h is prepared by a record that begins where the cut is, so it is not before it.
    assert positions(cut) == {"a": 100, "b": 100}
    assert of(cut, "a").undecided == (Undecided("g", Lsn(50), Lsn(60)),)
    assert of(cut, "b").undecided == (Undecided("g", Lsn(60), Lsn(70)),)
    assert cut.global_transactions == 0
    assert cut.in_flight == 1


def test_what_was_left_out_comes_in_when_it_is_committed_anywhere() -> None:
    left = (Undecided("g", Lsn(50), Lsn(60)),)
    cut = resolve(
        {
            "a": window(300, 400, ("K", 250, "g"), previous=200, undecided=left),
            "b": window(300, 400, previous=200, undecided=left),
        }
    )
    assert positions(cut) == {"a": 300, "b": 300}
    assert of(cut, "a").undecided == of(cut, "b").undecided == ()
    assert (cut.global_transactions, cut.included_early) == (1, 1)


def test_what_was_left_out_and_rolled_back_never_comes_in() -> None:
    cut = resolve(
        {"a": window(300, 400, ("R", 50, "g", 250), previous=200, undecided=(Undecided("g", Lsn(50), Lsn(60)),))}
    )
    assert of(cut, "a").undecided == ()
    assert of(cut, "a").rolled_back == (50,)
    assert cut.global_transactions == 0


def test_events_before_the_window_belong_to_the_cut_before() -> None:
    cut = resolve(
        {
            "a": window(300, 400, ("C", 190, None), ("P", 180, "g"), ("K", 190, "g"), ("C", 200, None), previous=200),
            "b": window(300, 400, ("P", 310, "g"), previous=200),
        }
    )
    assert of(cut, "a").local_transactions == 1
    assert positions(cut) == {"a": 300, "b": 300}


def test_an_attempt_that_was_rolled_back_stays_out_when_its_gid_is_used_again() -> None:
    cut = resolve(
        {
            "a": window(200, 300, ("P", 50, "g"), ("R", 50, "g", 70), ("P", 110, "g"), ("K", 130, "g")),
            "b": window(200, 300, ("P", 40, "g"), ("R", 40, "g", 80), ("P", 210, "g")),
            # The second attempt does not come here, and the first must not raise the position.
            "c": window(200, 300, ("P", 250, "g"), ("R", 250, "g", 270)),
        }
    )
    assert positions(cut) == {"a": 200, "b": 220, "c": 200}
    assert of(cut, "a").rolled_back == (50,)
    assert of(cut, "b").rolled_back == (40,)
    assert cut.global_transactions == 1


def test_a_gid_that_names_two_transactions_is_refused_where_it_is_not_clear_which() -> None:
    used = [("P", 50, "g"), ("K", 70, "g"), ("P", 90, "g")]
    with pytest.raises(GlobalIdReusedError, match="'g'"):
        resolve({"a": window(100, 200, *used)})
    with pytest.raises(GlobalIdReusedError):
        resolve({"a": window(150, 200, *used, ("K", 160, "g")), "b": window(100, 200)})
    # Included early at the cut before, committed here after it, and used again.
    with pytest.raises(GlobalIdReusedError):
        resolve({"a": window(100, 200, ("K", 70, "g"), ("P", 90, "g"), previous=60)})


def test_a_gid_may_be_used_again_where_all_its_uses_are_over() -> None:
    uses = [("P", 20, "g"), ("K", 40, "g"), ("P", 50, "g"), ("K", 70, "g")]
    cut = resolve({"a": window(100, 200, *uses), "b": window(100, 200, *uses)})
    assert positions(cut) == {"a": 100, "b": 100}


def test_the_branches_of_one_transaction_on_one_node_are_no_reuse() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 20, "g"), ("P", 40, "g"), ("K", 90, "g"), ("K", 110, "g")),
            "b": window(100, 200, ("P", 120, "g"), ("P", 140, "g")),
        }
    )
    assert positions(cut) == {"a": 100, "b": 150}
    assert cut.global_transactions == 1


def test_a_one_phase_commit_with_a_global_id_brings_in_what_others_prepared() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("C", 80, "g")),
            "b": window(100, 200, ("C", 110, None), ("P", 120, "g"), ("C", 140, None)),
        }
    )
    assert positions(cut) == {"a": 100, "b": 130}
    assert of(cut, "b").undecided == ()
    # It is a global transaction, and no local one.
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
    # And on from there: i is committed before the position that the one-phase commit raised.
    assert positions(cut) == {"a": 130, "b": 100, "c": 160}
    assert of(cut, "a").undecided == (Undecided("h", Lsn(110), Lsn(120)),)
    assert cut.global_transactions == 2


def test_a_one_phase_commit_after_the_cut_is_neither_in_it_nor_undecided() -> None:
    cut = resolve(
        {"a": window(100, 200, ("C", 100, "g")), "b": window(100, 200, ("P", 50, "g")), "c": window(100, 200)}
    )
    assert positions(cut) == {"a": 100, "b": 100, "c": 100}
    assert of(cut, "a").undecided == ()
    assert of(cut, "b").undecided == (Undecided("g", Lsn(50), Lsn(60)),)
    assert (cut.global_transactions, cut.in_flight) == (0, 1)
    assert [part.local_transactions for part in cut.nodes] == [0, 0, 0]
    later = resolve(
        {
            "a": window(300, 400, ("C", 100, "g"), previous=100),
            "b": window(300, 400, ("P", 50, "g"), previous=100, undecided=of(cut, "b").undecided),
            "c": window(300, 400, previous=100),
        }
    )
    assert of(later, "b").undecided == ()
    assert (later.global_transactions, later.included_early) == (1, 1)


def test_a_one_phase_commit_alone_is_a_global_transaction_that_is_counted_once() -> None:
    cut = resolve({"a": window(100, 200, ("C", 50, "g"), ("C", 60, None)), "b": window(100, 200)})
    assert of(cut, "a").local_transactions == 1
    assert (cut.global_transactions, cut.included_early, cut.in_flight) == (1, 0, 0)


def test_a_branch_prepared_beside_a_one_phase_commit_is_no_reuse() -> None:
    cut = resolve(
        {
            "a": window(100, 200, ("P", 20, "g"), ("C", 60, "g"), ("K", 110, "g")),
            "b": window(100, 200, ("P", 30, "g")),
        }
    )
    assert of(cut, "a").undecided == of(cut, "b").undecided == ()
    assert cut.global_transactions == 1


def test_a_gid_of_a_one_phase_commit_may_not_be_used_again_around_a_cut() -> None:
    for again in ("C", "P"):
        with pytest.raises(GlobalIdReusedError, match="'g'"):
            resolve({"a": window(100, 200, ("C", 50, "g"), (again, 120, "g"))})
    with pytest.raises(GlobalIdReusedError, match="'g'"):
        resolve({"a": window(100, 200, ("P", 20, "g"), ("K", 40, "g"), ("C", 120, "g"))})
    over = resolve({"a": window(100, 200, ("C", 50, "g"), ("C", 70, "g"))})
    assert positions(over) == {"a": 100}


def test_an_empty_fleet_has_an_empty_cut() -> None:
    assert resolve({}) == Cut((), 0, 0, 0)
