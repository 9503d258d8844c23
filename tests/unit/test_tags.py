"""Tags: how a coordinator names a global transaction if it commits its own part in one phase."""

from __future__ import annotations

import pytest

from cutline.columns.bytes_column import from_list
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.segments.archive import Definition
from tests.unit.made_changes import FULL, FULL_OID, RELATIONS, decode, new_decoder
from tests.wal import pgoutput_messages as pgoutput


def tag(content: bytes, *, transactional: bool = True) -> bytes:
    return pgoutput.message(90, "snapshot.gid", content, transactional=transactional)


def names_of_commits(form: str, *messages: bytes) -> list[str | None]:
    decoded = Decoder("n1", (Definition(0, FULL),), form).feed(from_list([*RELATIONS, *messages]))
    return [row["global_id"] for row in decoded.events.to_pylist() if chr(row["op"]) == "C"]


def test_a_tag_names_the_transaction_it_is_in() -> None:
    row = pgoutput.insert(FULL_OID, [b"1", None])
    decoded = decode(
        pgoutput.begin(100, 7), row, tag(b"g1"), row, pgoutput.commit(100, 150),
        pgoutput.begin(200, 8), row, pgoutput.commit(200, 250),
        pgoutput.begin(300, 9), tag("ü/1".encode()), pgoutput.commit(300, 350),
    )  # fmt: skip
    found = [(row["lsn"], row["end_lsn"], row["xid"], row["global_id"]) for row in decoded.events.to_pylist()]
    assert found == [(100, 150, 7, "g1"), (200, 250, 8, None), (300, 350, 9, "ü/1")]
    # The changes have no global id: only the commit event has it.
    assert decoded.changes["global_id"].null_count == 3


def test_the_last_tag_of_a_transaction_counts() -> None:
    first, second = pgoutput.begin(100, 7), pgoutput.begin(200, 8)
    ends = pgoutput.commit(100, 150), pgoutput.commit(200, 250)
    assert names_of_commits("exact", first, tag(b"a"), tag(b"b"), tag(b"c"), ends[0], second, tag(b"a"), ends[1]) == [
        "c",
        "a",
    ]


def test_a_tag_follows_the_rule_for_gids() -> None:
    messages = [pgoutput.begin(100, 7), tag(b"1_YQ==_Yg=="), pgoutput.commit(100, 150)]
    assert names_of_commits("xa", *messages) == ["1_YQ=="]
    assert names_of_commits("exact", *messages) == ["1_YQ==_Yg=="]
    assert names_of_commits("citus", pgoutput.begin(1, 7), tag(b"citus_0_1_2_3"), pgoutput.commit(1, 9)) == [
        "citus_0_1_2"
    ]
    assert names_of_commits(r"(?P<global>\w+)/", pgoutput.begin(1, 7), tag(b"a/b"), pgoutput.commit(1, 9)) == ["a"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", None), (b"\xff", None), (b"x" * 200, None), (b"x" * 199, "x" * 199)],
)
def test_a_text_that_can_not_be_a_gid_is_not_a_tag(content: bytes, expected: str | None) -> None:
    messages = pgoutput.begin(100, 7), tag(content), pgoutput.commit(100, 150)
    assert names_of_commits("exact", *messages) == [expected]
    # Nor does it replace another tag.
    more = tag(b"before"), tag(content), pgoutput.commit(100, 150), pgoutput.begin(200, 8), tag(b"next")
    assert names_of_commits("exact", messages[0], *more, pgoutput.commit(200, 250)) == [expected or "before", "next"]


def test_other_messages_are_not_tags() -> None:
    others = ["snapshot.gi", "snapshot.gids", "snapshot", "Snapshot.gid", ""]
    messages = [pgoutput.message(90, prefix, b"g", transactional=True) for prefix in others]
    assert names_of_commits("exact", pgoutput.begin(100, 7), *messages, pgoutput.commit(100, 150)) == [None]
    # A message that is not transactional belongs to no transaction, wherever it is.
    loose = [pgoutput.message(lsn, "snapshot.gid", b"g") for lsn in (90, 190)]
    assert names_of_commits("exact", loose[0], pgoutput.begin(100, 7), pgoutput.commit(100, 150), loose[1]) == [None]


def test_a_prepared_transaction_keeps_its_own_name() -> None:
    row = pgoutput.insert(FULL_OID, [b"1", None])
    messages = [pgoutput.begin_prepare(200, 260, 8, "g1"), tag(b"g2"), row, pgoutput.prepare(200, 260, 8, "g1")]
    decoded = decode(*messages, pgoutput.begin(300, 9), pgoutput.commit(300, 350))
    assert decoded.events["global_id"].to_pylist() == ["g1", None]
    assert decoded.changes["global_id"].to_pylist() == ["g1"]
    # The same holds if a batch begins in the middle of the transaction.
    one = new_decoder()
    one.feed(from_list([*RELATIONS, messages[0]]))
    one.feed(from_list(messages[1:2]))
    assert one.feed(from_list(messages[2:])).events["global_id"].to_pylist() == ["g1"]
