"""What a drain refuses: it stores nothing of it, and another drain continues from the archive as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import cutline.wal.decoding.decoder
import cutline.wal.drain.drain
import cutline.wal.drain.peek
from cutline.columns.bytes_column import from_list
from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect
from cutline.storage.errors import UnreachableError
from cutline.wal.decoding.decoder import LINE_BYTES_MAX
from tests.integration.wal_follower import Follower
from tests.integration.wal_place import Place, create_one_table, groups_of, place
from tests.run.soak import SOAK_SECONDS
from tests.wal import pgoutput_messages as pgoutput

__all__ = ["place"]  # the fixture


def test_a_segment_with_unplanned_definitions_belongs_to_another_drain(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutline.wal.drain.drain, "SLOT_IN_USE_SECONDS_MAX", 0.2)
    follower = place.follow(create_one_table(place))
    (unlisted,) = follower.task.definitions
    rival = Follower(
        replace(follower.task, unlisted_numbers=frozenset({unlisted.group.number})), follower.groups, follower.base
    )
    place.connection.execute("INSERT INTO t VALUES (1)")
    (archived,) = rival.drain_fully(place.write_finish()).segments
    assert archived.definitions == (unlisted,)
    assert list(archived.first_changes) == [unlisted.group.number]
    place.connection.execute("INSERT INTO t VALUES (2)")
    report = follower.drain(place.write_finish())
    assert report.problem is not None
    assert report.problem["slug"] == "drain-busy"
    # A drain that was planned after that segment accepts it.
    follower.task = replace(follower.task, planned=archived.segment.number)
    assert len(follower.drain_fully(place.write_finish()).segments) == 2
    assert follower.state() == place.lines(follower.groups)


def without_end(messages: list[bytes], _: int) -> list[bytes]:
    return messages[: max(place for place, message in enumerate(messages) if message[:1] == b"C")]


def with_message_past_finish(messages: list[bytes], finish: int) -> list[bytes]:
    return [*messages, pgoutput.message(finish + 8, "others", b"")]


def with_mixed_rows(messages: list[bytes], _: int) -> list[bytes]:
    """Put the end of the first row into the second."""
    first, second = [place for place, message in enumerate(messages) if message[:1] == b"I"]
    return [*messages[:second], messages[second][:-4] + messages[first][-9:], *messages[second + 1 :]]


@pytest.mark.parametrize("with_psycopg", [True, False])
def test_the_words_of_the_server_are_kept(place: Place, monkeypatch: pytest.MonkeyPatch, *, with_psycopg: bool) -> None:
    """The session converts nothing, but a server's messages and the names in them are UTF-8."""
    node = place.follow(create_one_table(place)).task.node
    query = "SELECT convert_to((text 'größe' || generate_series(1, 1))::int::text, 'UTF8')"
    monkeypatch.setattr(cutline.wal.drain.peek, "peek_query", lambda *_: query)
    with pytest.raises(UnreachableError, match='invalid input syntax for type integer: "größe1"'):
        list(cutline.wal.drain.peek.peek(node, "slot", ("all",), Lsn(1), 10, with_psycopg=with_psycopg))


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (without_end, r"end in the middle of the transaction at \w+/\w+"),
        (with_message_past_finish, r"up to \w+/\w+, but only WAL up to"),
        (with_mixed_rows, r"message 4 of its slot \(\d+ bytes, in the transaction at \w+/\w+\) is invalid: a row"),
    ],
)
def test_nothing_of_an_invalid_chunk_is_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch, alter: Callable[[list[bytes], int], list[bytes]], problem: str
) -> None:
    follower = place.follow(create_one_table(place))
    place.connection.execute("INSERT INTO t VALUES (1, 'one'), (2, 'another')")
    finish = place.write_finish()
    peek = cutline.wal.drain.drain.peek

    def altered_peek(
        node: Node, slot: str, publications: tuple[str, ...], finish: int, messages_max: int, *, with_psycopg: bool
    ) -> Iterator[Any]:
        parts = peek(node, slot, publications, Lsn(finish), messages_max, with_psycopg=with_psycopg)
        messages = [one for part in parts for one in part.to_pylist()]
        yield from_list(alter(messages, finish)).to_arrow()

    monkeypatch.setattr(cutline.wal.drain.drain, "peek", altered_peek)
    report = follower.drain(finish)
    assert report.problem is not None
    assert report.problem["slug"] == "decoding"
    assert report.problem["message"].startswith(f"node {follower.task.node.id}: ")
    assert re.search(problem, report.problem["message"])
    assert follower.rows() == []
    monkeypatch.undo()
    follower.drain_fully(finish)
    assert follower.state() == place.lines(follower.groups)


# A type whose values can be stored and sent, and not printed.
UNPRINTABLE = (
    "CREATE TYPE boom",
    "CREATE FUNCTION boom_in(cstring) RETURNS boom LANGUAGE internal IMMUTABLE STRICT AS 'textin'",
    "CREATE FUNCTION boom_out(boom) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'enum_out'",
    "CREATE FUNCTION boom_send(boom) RETURNS bytea LANGUAGE internal IMMUTABLE STRICT AS 'textsend'",
    "CREATE TYPE boom (INPUT = boom_in, OUTPUT = boom_out, SEND = boom_send, STORAGE = extended)",
    "CREATE TABLE refused (a uuid, v boom, b int, PRIMARY KEY (b, a))",
)


@pytest.mark.parametrize("is_update", [False, True])
def test_a_row_that_cannot_be_printed_is_named(place: Place, *, is_update: bool) -> None:
    follower = place.follow(create_one_table(place, *UNPRINTABLE))
    key = "'00000000-0000-0000-0000-00000000002a'"
    place.connection.execute("INSERT INTO t SELECT n, 'before' FROM generate_series(1, 10) n")
    place.connection.execute("INSERT INTO refused SELECT gen_random_uuid(), NULL, n FROM generate_series(1, 10) n")
    if is_update:
        place.connection.execute(f"INSERT INTO refused VALUES ({key}, NULL, 7)".encode())
        place.connection.execute(f"UPDATE refused SET v = 'x' WHERE a = {key}".encode())
    else:
        place.connection.execute(f"INSERT INTO refused VALUES ({key}, 'x', 7), (gen_random_uuid(), 'x', 8)".encode())
    place.connection.execute("INSERT INTO t VALUES (100, 'after')")
    problem = follower.drain(place.write_finish()).problem
    assert problem is not None
    assert problem["slug"] == "row-undecodable"
    assert "table public.refused: PostgreSQL can't print a row that was written" in problem["message"]
    assert problem["message"].endswith("(a = 00000000-0000-0000-0000-00000000002a, b = 7)")
    assert "snapshot create NAME" in str(problem["hint"])


@pytest.mark.parametrize("has_key", [True, False])
def test_a_row_whose_line_copy_could_not_read_is_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, has_key: bool
) -> None:
    place.connection.execute("CREATE TABLE escaped (v text, b int, a uuid)")
    place.connection.execute(
        "ALTER TABLE escaped ADD PRIMARY KEY (b, a)" if has_key else "ALTER TABLE escaped REPLICA IDENTITY FULL"
    )
    follower = place.follow(groups_of(place))
    key = "00000000-0000-0000-0000-00000000002a"
    # 7, its uuid, two separators, and 60 newlines of two characters each; a newline ends the line.
    fits = 1 + 36 + 3 + 2 * 60
    monkeypatch.setattr(cutline.wal.decoding.decoder, "LINE_BYTES_MAX", fits)
    place.connection.execute("INSERT INTO escaped VALUES (repeat(E'\n', 60), 7, %s)", (key,))
    follower.drain_fully(place.write_finish())
    place.connection.execute("INSERT INTO escaped VALUES (repeat(E'\n', 61), 8, %s)", (key,))
    problem = follower.drain(place.write_finish()).problem
    assert problem is not None
    assert problem["slug"] == "row-undecodable"
    row = f"(b = 8, a = {key})" if has_key else "(the table has no key)"
    assert f"table public.escaped: a row was written that takes {fits + 2} bytes in COPY's format" in problem["message"]
    assert problem["message"].endswith(row)
    assert "snapshot create NAME" in str(problem["hint"])


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1")
@pytest.mark.timeout(1800)
def test_the_longest_line_that_copy_can_read_is_the_longest_that_is_taken(place: Place) -> None:
    follower = place.follow(create_one_table(place, "ALTER TABLE t ALTER v SET STORAGE EXTERNAL"))
    # A key of one digit, two separators, and escaped newlines, with one character more if the number is odd.
    escaped, odd = divmod(LINE_BYTES_MAX - 3, 2)
    longest = f"repeat(E'\\n', {escaped}) || repeat('x', {odd})"
    place.connection.execute(f"INSERT INTO t SELECT 1, {longest}".encode())
    follower.drain_fully(place.write_finish())
    # PostgreSQL reads what it prints.
    with connect(place.primary) as reader, connect(place.primary) as writer:
        writer.execute("CREATE TABLE again (LIKE t)")
        with (
            reader.cursor().copy(b"COPY t TO STDOUT") as lines,
            writer.cursor().copy(b"COPY again FROM STDIN") as again,
        ):
            for line in lines:
                assert len(line) == LINE_BYTES_MAX
                for start in range(0, len(line), 1 << 20):
                    again.write(line[start : start + (1 << 20)])
    place.connection.execute(f"UPDATE t SET v = {longest} || 'x' WHERE id = 1".encode())
    with (
        pytest.raises(psycopg.Error),
        connect(place.primary) as reader,
        reader.cursor().copy(b"COPY t TO STDOUT") as lines,
    ):
        list(lines)
    problem = follower.drain(place.write_finish()).problem
    assert problem is not None
    assert problem["slug"] == "row-undecodable"
    assert "table public.t: " in problem["message"]
    assert problem["message"].endswith("(id = 1)")
