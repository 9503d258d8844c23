"""The mark of a chain that has ended: it is stored once, is of one chain, and is refused if a byte of it changed."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from cutline.check.structure import check_structure
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.end_marks import EndMark, chain_ended_error, end_key, has_end, mark_end, read_end
from cutline.storage.memory import InMemoryStore
from tests.unit.made_commits import commit

STORES = count()
END = EndMark("daily", "op-1", 3, "s1", "2026-11-20T00:00:00.000Z")


def memory() -> InMemoryStore:
    return InMemoryStore(f"memory://lost-{next(STORES)}")


def test_a_mark_says_after_which_increment_and_why() -> None:
    by_hand = replace(END, ended_by="cutline end daily ops@backup-1:4711")
    assert by_hand.text == "can't be continued after increment 3: ended by ops@backup-1"
    assert END.text == "can't be continued after increment 3: ended by an unknown user"
    assert replace(END, after_increment=0).text.startswith("can't be continued after the full snapshot: ")
    ended = replace(END, restore="op-9")
    assert ended.text == "can't be continued after increment 3: restore op-9 set aside its database on node s1"
    several = replace(ended, nodes=("s1", "s2", "s3"))
    assert several.text == (
        "can't be continued after increment 3: restore op-9 set aside its databases on nodes s1, s2, s3"
    )
    assert replace(several, nodes=tuple(f"s{n}" for n in range(1, 9))).text.endswith("s4, s5 and 3 more")
    replaced = replace(END, successor="weekly")
    assert replaced.text == "can't be continued after increment 3: weekly has taken its place"
    gone = replace(replaced, slot_problem="slot cutline_op_1 does not exist")
    assert gone.text == (
        "can't be continued after increment 3: node s1: slot cutline_op_1 does not exist; weekly has taken its place"
    )
    error = chain_ended_error(END)
    assert (error.exit_code, error.slug) == (3, "chain-ended")
    assert "snapshot daily can't be continued after increment 3" in error.message
    assert END.at in error.message
    assert error.details == {
        "snapshot": "daily", "node": "s1", "after_increment": 3, "at": END.at, "restore": "", "successor": "",
        "slot_problem": "", "nodes": (), "ended_by": "",
    }  # fmt: skip


def test_the_first_mark_stays_and_another_chain_of_that_name_has_none() -> None:
    store = memory()
    assert read_end(store, "daily", "op-1") is None
    mark_end(store, END)
    mark_end(store, replace(END, node="s2"))
    assert read_end(store, "daily", "op-1") == END
    assert has_end(store, "daily", "op-1")
    assert not has_end(store, "daily", "op-2")
    assert read_end(store, "daily", "op-2") is None


def test_a_damaged_mark_is_refused_and_never_believed() -> None:
    store = memory()
    mark_end(store, END)
    body = store.read(end_key("daily", "op-1"))
    for place in range(0, len(body), 7):
        damaged = memory()
        damaged.create(end_key("daily", "op-1"), body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :])
        for read in (read_end, has_end):
            with pytest.raises(ManifestError):
                read(damaged, "daily", "op-1")
    newer = memory()
    newer.create(end_key("daily", "op-1"), seal({"schema": "cutline/ended/2", "why": "another reason"}))
    with pytest.raises(ManifestError, match="is not a valid document for this version"):
        read_end(newer, "daily", "op-1")


@pytest.mark.parametrize(
    ("values", "increment", "conflict", "doubt"),
    [
        ({}, None, "", ""),
        (
            {"after_increment": 3},
            None,
            "after increment 3 according to its mark, but that increment does not exist",
            "",
        ),
        # A check of an earlier increment reads no later ones.
        ({}, 1, "", ""),
        ({"after_increment": 1}, None, "after increment 1 according to its mark, but increment 2 follows", ""),
        # A create may commit while a restore replaces the databases.
        ({"after_increment": 1, "restore": "op-9"}, None, "", ""),
        # The slot's problem may be of no node.
        ({"successor": "weekly", "node": ""}, None, "", ""),
        ({"node": "z"}, None, "", "names z, which is no node of the snapshot"),
    ],
)
def test_a_mark_that_its_chain_contradicts_is_found(
    values: dict[str, object], increment: int | None, conflict: str, doubt: str
) -> None:
    store = memory()
    for number in (0, 1, 2):
        put_commit(store, commit(number))
    lost = EndMark("daily", "op-0", 2, "a", "2026-11-20T00:00:00.000Z")
    mark_end(store, replace(lost, **values))
    _, report = check_structure(store, "fleet", "daily", increment, {})
    for found, detail in (([one.detail for one in report.conflicts if one.kind == "mark"], conflict),
                          ([one.detail for one in report.doubts], doubt)):  # fmt: skip
        assert len(found) == bool(detail)
        assert not detail or detail in found[0]
