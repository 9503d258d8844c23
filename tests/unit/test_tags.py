"""Tags: how a coordinator names a transaction whose own part it commits in one phase."""

from __future__ import annotations

import pytest

from columns.bytes_column import from_list
from tests import pgoutput_messages as made
from tests.unit.made_changes import FULL, FULL_OID, RELATIONS, decode, decoder
from wal.decoding.decoder import Decoder
from wal.segments.definitions import Definition


def tagged(content: bytes, *, transactional: bool = True) -> bytes:
    return made.message(90, "snapshot.gid", content, transactional=transactional)


def names_of_commits(form: str, *messages: bytes) -> list[str | None]:
    decoded = Decoder("n1", (Definition(0, FULL),), form).feed(from_list([*RELATIONS, *messages]))
    return [row["global_id"] for row in decoded.events.to_pylist() if chr(row["op"]) == "C"]


def test_a_tag_names_the_transaction_it_is_in() -> None:
    row = made.insert(FULL_OID, [b"1", None])
    decoded = decode(
        made.begin(100, 7), row, tagged(b"g1"), row, made.commit(100, 150),
        made.begin(200, 8), row, made.commit(200, 250),
        made.begin(300, 9), tagged("ü/1".encode()), made.commit(300, 350),
    )  # fmt: skip
    found = [(row["lsn"], row["end_lsn"], row["xid"], row["global_id"]) for row in decoded.events.to_pylist()]
    assert found == [(100, 150, 7, "g1"), (200, 250, 8, None), (300, 350, 9, "ü/1")]
    # What it changed is its node's own: only its end has the name.
    assert decoded.changes["global_id"].null_count == 3


def test_the_last_tag_of_a_transaction_counts() -> None:
    first, second = made.begin(100, 7), made.begin(200, 8)
    ends = made.commit(100, 150), made.commit(200, 250)
    assert names_of_commits(
        "exact", first, tagged(b"a"), tagged(b"b"), tagged(b"c"), ends[0], second, tagged(b"a"), ends[1]
    ) == ["c", "a"]


def test_a_tag_goes_by_the_rule_for_gids() -> None:
    messages = [made.begin(100, 7), tagged(b"1_YQ==_Yg=="), made.commit(100, 150)]
    assert names_of_commits("xa", *messages) == ["1_YQ=="]
    assert names_of_commits("exact", *messages) == ["1_YQ==_Yg=="]
    assert names_of_commits("citus", made.begin(1, 7), tagged(b"citus_0_1_2_3"), made.commit(1, 9)) == ["citus_0_1_2"]
    assert names_of_commits(r"(?P<global>\w+)/", made.begin(1, 7), tagged(b"a/b"), made.commit(1, 9)) == ["a"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", None), (b"\xff", None), (b"x" * 200, None), (b"x" * 199, "x" * 199)],
)
def test_what_could_be_no_gid_is_no_tag(content: bytes, expected: str | None) -> None:
    messages = made.begin(100, 7), tagged(content), made.commit(100, 150)
    assert names_of_commits("exact", *messages) == [expected]
    # Nor does it take the place of one.
    more = tagged(b"before"), tagged(content), made.commit(100, 150), made.begin(200, 8), tagged(b"next")
    assert names_of_commits("exact", messages[0], *more, made.commit(200, 250)) == [expected or "before", "next"]


def test_others_messages_are_no_tags() -> None:
    others = ["snapshot.gi", "snapshot.gids", "snapshot", "Snapshot.gid", ""]
    messages = [made.message(90, prefix, b"g", transactional=True) for prefix in others]
    assert names_of_commits("exact", made.begin(100, 7), *messages, made.commit(100, 150)) == [None]
    # One that is not transactional belongs to nothing, wherever it comes.
    loose = [made.message(lsn, "snapshot.gid", b"g") for lsn in (90, 190)]
    assert names_of_commits("exact", loose[0], made.begin(100, 7), made.commit(100, 150), loose[1]) == [None]


def test_a_prepared_transaction_keeps_its_own_name() -> None:
    row = made.insert(FULL_OID, [b"1", None])
    messages = [made.begin_prepare(200, 260, 8, "g1"), tagged(b"g2"), row, made.prepare(200, 260, 8, "g1")]
    decoded = decode(*messages, made.begin(300, 9), made.commit(300, 350))
    assert decoded.events["global_id"].to_pylist() == ["g1", None]
    assert decoded.changes["global_id"].to_pylist() == ["g1"]
    # Nor where a batch begins in its middle.
    one = decoder()
    one.feed(from_list([*RELATIONS, messages[0]]))
    one.feed(from_list(messages[1:2]))
    assert one.feed(from_list(messages[2:])).events["global_id"].to_pylist() == ["g1"]
