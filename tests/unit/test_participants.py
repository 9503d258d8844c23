"""How applications name the participants of a transaction: in gids, and by messages. Events keep them as keys."""

from __future__ import annotations

import pytest

from cutline.columns.bytes_column import from_list
from cutline.fleet.participants import is_single_name, split_names
from cutline.nodes.encodings import Texts
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.decoding.transactions import PARTICIPANTS_BYTES_MAX
from cutline.wal.segments.archive import Definition
from tests.unit.made_changes import FULL, FULL_OID, RELATIONS
from tests.wal import pgoutput_messages as pgoutput

RULE = r"^(?P<global>order-\d+)(@(?P<participants>[^/]+))?/"


def named(content: str | bytes, *, transactional: bool = True, prefix: str = "snapshot.participants") -> bytes:
    body = content.encode() if isinstance(content, str) else content
    return pgoutput.message(90, prefix, body, transactional=transactional)


def tag(gid: str) -> bytes:
    return pgoutput.message(90, "snapshot.gid", gid.encode(), transactional=True)


def events_of(*batches: list[bytes], form: str = "exact", convert: Texts | None = None) -> list[tuple[str, str, bytes]]:
    """The kind, global id and key of every event in these batches."""
    decoder = Decoder("n1", (Definition(FULL_OID, FULL),), form, convert=convert)
    rows = [row for batch in batches for row in decoder.feed(from_list(batch)).events.to_pylist()]
    return [(chr(row["op"]), row["global_id"], row["key"]) for row in rows]


def prepared(gid: str, *messages: bytes) -> list[bytes]:
    return [pgoutput.begin_prepare(200, 260, 8, gid), *messages, pgoutput.prepare(200, 260, 8, gid)]


def committed(*messages: bytes) -> list[bytes]:
    return [pgoutput.begin(100, 7), *messages, pgoutput.commit(100, 150)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("s1", ["s1"]),
        ("s1,s2", ["s1", "s2"]),
        (" s1 ,\ts2\n", ["s1", "s2"]),
        ("s1+s2;s3|s4&s5", ["s1", "s2", "s3", "s4", "s5"]),
        ("", []),
        (",,", []),
        ("shop-1.a_b", ["shop-1.a_b"]),
        ("s1,s1", ["s1", "s1"]),
    ],
)
def test_names_are_separated_by_what_no_node_id_contains(text: str, names: list[str]) -> None:
    assert split_names(text) == names


def test_a_single_name_has_no_separator() -> None:
    assert is_single_name("db:5432")
    assert not any(map(is_single_name, ["", "a b", "a,b", " a"]))


def test_a_message_names_the_participants_of_its_part() -> None:
    row = pgoutput.insert(FULL_OID, [b"1", None])
    assert events_of([*RELATIONS, *prepared("g", named("s1,s2"), row)]) == [("P", "g", b"s1,s2")]
    assert events_of(committed(tag("g"), named("s1,s2"))) == [("C", "g", b"s1,s2")]
    assert events_of([*prepared("g"), pgoutput.commit_prepared(300, 340, 8, "g")]) == [("P", "g", b""), ("K", "g", b"")]
    # Other messages name nobody: other prefixes, and messages that belong to no transaction.
    others = [
        named("s1", prefix="snapshot.participant"),
        named("s1", prefix="snapshot"),
        named("s1", transactional=False),
    ]
    assert events_of([others[2], *prepared("g", *others[:2])]) == [("P", "g", b"")]


def test_a_transaction_without_a_global_id_has_no_participants() -> None:
    assert events_of(committed(named("s1,s2"))) == [("C", None, b"")]


def test_the_last_message_of_a_part_counts_unless_it_is_unusable() -> None:
    assert events_of(prepared("g", named("s1"), named("s1,s2"))) == [("P", "g", b"s1,s2")]
    for unusable in (b"", b"\xff", b"s" * (PARTICIPANTS_BYTES_MAX + 1)):
        assert events_of(prepared("g", named("s1"), named(unusable))) == [("P", "g", b"s1")]
    most = "s" * PARTICIPANTS_BYTES_MAX
    assert events_of(prepared("g", named(most))) == [("P", "g", most.encode())]


def test_each_transaction_has_its_own_participants() -> None:
    two = [
        *prepared("g", named("s1")), *committed(tag("h")), pgoutput.begin(300, 9), tag("i"), named("s2"),
        pgoutput.commit(300, 350),
    ]  # fmt: skip
    assert sorted(events_of(two)) == [("C", "h", b""), ("C", "i", b"s2"), ("P", "g", b"s1")]


def test_participants_are_kept_over_all_batches_of_a_transaction() -> None:
    begin, *_, end = prepared("g")
    assert events_of([begin, named("s1")], [named("other", prefix="x")], [end]) == [("P", "g", b"s1")]
    assert events_of([begin, named("s1")], [named("s2")], [end]) == [("P", "g", b"s2")]
    begin, *_, end = committed()
    assert events_of([begin, tag("g@s1"), named("s1")], [end, *prepared("h")]) == [
        ("C", "g@s1", b"s1"),
        ("P", "h", b""),
    ]


def test_a_rule_finds_participants_in_gids_and_tags() -> None:
    assert events_of(prepared("order-1@s1+s2/x"), form=RULE) == [("P", "order-1", b"s1+s2")]
    assert events_of(committed(tag("order-1@s1+s2/x")), form=RULE) == [("C", "order-1", b"s1+s2")]
    # The group need not take part in the match, and a gid need not match.
    assert events_of(prepared("order-1/x"), form=RULE) == [("P", "order-1", b"")]
    assert events_of(prepared("other@s1"), form=RULE) == [("P", "other@s1", b"")]
    assert events_of(prepared("order-1@s1/x"), form=r"^(?P<global>order-\d+)") == [("P", "order-1", b"")]


def test_a_tag_is_carried_to_the_end_of_its_transaction_as_a_gid() -> None:
    begin, *_, end = committed()
    assert events_of([begin, tag("order-1@s1+s2/x")], [end], form=RULE) == [("C", "order-1", b"s1+s2")]


def test_names_in_a_gid_and_in_a_message_are_joined() -> None:
    assert events_of(prepared("order-1@s1/x", named("s2,s3")), form=RULE) == [("P", "order-1", b"s1,s2,s3")]
    assert events_of(prepared("order-1/x", named("s2,s3")), form=RULE) == [("P", "order-1", b"s2,s3")]
    mixed = [*committed(), pgoutput.begin(160, 9), tag("order-2@s4/x"), pgoutput.commit(160, 170)]
    assert events_of(mixed, form=RULE) == [("C", None, b""), ("C", "order-2", b"s4")]
