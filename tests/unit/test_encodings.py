"""Server bytes as text and back: rows and DDL byte for byte, names as the server's catalogs have them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.wal.pgoutput_messages as pgoutput
from cutline.columns.bytes_column import from_list
from cutline.nodes.encodings import ADAPTERS, raw_bytes, raw_text, texts_of_raw
from cutline.nodes.groups import Column, Group, copy_line, copy_text
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.decoding.pgoutput import DecodingError
from cutline.wal.segments.archive import Definition

LATIN1_NAME = "größe"
GROUP = Group(1, "public", LATIN1_NAME, "default", 1, (Column("é", "text", 25, -1, 0, 1),))


@given(st.binary())
def test_any_bytes_survive_conversion_to_raw_text_and_back(body: bytes) -> None:
    text = raw_text(body)
    assert raw_bytes(text) == body
    # As a commit stores the text, and as a reader of UTF-8 sees it.
    assert raw_bytes(json.loads(json.dumps(text))) == body
    assert raw_text("é\n𝄞".encode()) == "é\n𝄞"


@given(st.binary())
def test_a_missing_value_is_text_in_a_commit_and_the_bytes_of_copy_in_a_line(value: bytes) -> None:
    text = copy_text(value)
    assert text is not None
    # No surrogates, because a stored document can't contain any.
    assert text.encode().decode() == text
    escaped = value
    for plain, written in ((b"\\", b"\\\\"), (b"\b", b"\\b"), (b"\t", b"\\t"), (b"\n", b"\\n"), (b"\v", b"\\v"),
                           (b"\f", b"\\f"), (b"\r", b"\\r")):  # fmt: skip
        escaped = escaped.replace(plain, written)
    assert copy_line(text) == escaped


def test_bytes_that_are_not_utf8_are_escaped_if_the_server_has_no_encoding() -> None:
    assert texts_of_raw(["é".encode(), b"caf\xe9", b"\xed\xa0\x80"]) == ["é", r"caf\xe9", r"\xed\xa0\x80"]


def test_a_name_in_the_encoding_of_another_database_never_ends_a_session() -> None:
    loader = ADAPTERS.get_loader(19, 0)
    assert loader is not None
    assert loader(19).load(b"caf\xe9") == r"caf\xe9"
    assert loader(19).load("café".encode()) == "café"


def latin1(values: Sequence[bytes]) -> list[str]:
    return [value.decode("latin-1") for value in values]


def messages() -> list[bytes]:
    """A prepared transaction in LATIN1; some of its bytes are valid UTF-8 too."""
    columns = [(True, "é", 25, -1)]
    relation = pgoutput.relation(7, "public", LATIN1_NAME, "d", columns)
    relation = relation.replace(LATIN1_NAME.encode(), LATIN1_NAME.encode("latin-1")).replace("é".encode(), b"\xe9")
    gid = b"glob-\xc3\xa9"
    begin, end = pgoutput.begin_prepare(50, 90, 5, "GID"), pgoutput.prepare(50, 90, 5, "GID")
    return [begin.replace(b"GID", gid), relation, pgoutput.insert(7, [b"\xff"]), end.replace(b"GID", gid)]


def test_names_and_gids_are_converted_to_text_and_values_stay_bytes() -> None:
    decoded = Decoder("n1", (Definition(7, GROUP),), "exact", convert=latin1).feed(from_list(messages()))
    assert decoded.changes["row"].to_pylist() == [b"\xff\n"]
    assert decoded.changes["global_id"].to_pylist() == ["glob-Ã©"]
    assert decoded.events["global_id"].to_pylist() == ["glob-Ã©"]


def test_without_an_encoding_names_must_be_utf8() -> None:
    with pytest.raises(DecodingError, match="a name is not valid UTF-8"):
        Decoder("n1", (Definition(7, GROUP),), "exact").feed(from_list(messages()))
