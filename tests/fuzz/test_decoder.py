"""The decoder of pgoutput on damaged messages: it raises an error that names the place, or decodes what the bytes say.

`reference_reader` reads what the bytes say, value by value. CUTLINE_SOAK=SECONDS runs for that long; CUTLINE_SEED=N
repeats a run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from cutline.columns.bytes_column import from_list
from cutline.wal.decoding.decoder import Decoded, Decoder
from cutline.wal.decoding.known_definitions import SchemaMovedError
from cutline.wal.decoding.pgoutput import DecodingError
from tests.fuzz.captured import Captured, load_captured
from tests.fuzz.reference_cursor import RefusedError
from tests.fuzz.reference_reader import Reader, ReadResult
from tests.fuzz.reference_tables import Tables
from tests.run.soak import SEED, SOAK_SECONDS
from tests.wal.pgoutput_messages import begin, commit

SHORT_SECONDS = 6.0
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63)
LETTERS = b"BCbPKrRIUDTMOYSEcApNKOtnub\0\1\xff\\\t"
Batch = list[bytes]


@pytest.fixture(scope="module", params=["made", "15", "18"])
def source(request: pytest.FixtureRequest) -> Captured:
    return load_captured(request.param)


def sort_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["lsn"], row["seq"], row["group"], row["op"]))


def decode(source: Captured, parts: list[Batch]) -> tuple[list[Decoded], Exception | None]:
    """Decode the batches; return the results, and the error that ended the decoding, if any."""
    decoder = Decoder("n1", source.versions, "exact")
    found: list[Decoded] = []
    for part in parts:
        try:
            found.append(decoder.feed(from_list(part)))
        except (DecodingError, SchemaMovedError) as error:
            return found, error
    return found, None


def read_reference(source: Captured, messages: Batch) -> ReadResult | None:
    try:
        return Reader(Tables(source.versions)).read(messages)
    except RefusedError:
        return None


def check(source: Captured, messages: Batch, parts: list[Batch] | None = None) -> bool:
    """Compare the decoder with the reference; return whether it decoded everything."""
    found, error = decode(source, parts or [messages])
    expected = read_reference(source, messages)
    if error is not None:
        assert "node n1" in str(error)
        assert isinstance(error, SchemaMovedError) or ": message " in str(error)
        assert expected is None, error
        return False
    assert expected is not None, "what violates the protocol was decoded"
    changes = pa.concat_tables([one.changes for one in found]).drop_columns("changes").to_pylist()
    events = pa.concat_tables([one.events for one in found]).drop_columns("changes").to_pylist()
    assert sort_rows(changes) == sort_rows(expected.changes)
    assert sorted(map(str, events)) == sorted(map(str, expected.events))
    assert max(one.through for one in found) == expected.through
    assert sum(one.ignored for one in found) == expected.ignored
    return True


def test_intact_messages_are_decoded_as_the_reference_reads_them(source: Captured) -> None:
    assert check(source, source.messages)
    kinds = {chr(message[0]) for message in source.messages}
    assert kinds >= set("BCbPKrRIUDTM")


def test_a_message_truncated_at_any_byte_is_refused_at_its_place(source: Captured) -> None:
    """This holds for every form of message; nothing of the batch is decoded."""
    chosen = forms(source)
    if not SOAK_SECONDS:
        chosen = {form: number for form, number in chosen.items() if len(source.messages[number]) < 400}
    cases = 0
    for number in chosen.values():
        around = surroundings(source, number)
        message = source.messages[number]
        for size in range(len(message)):
            batch = [*around[0], message[:size], *around[1]]
            found, error = decode(source, [batch])
            assert not found
            assert isinstance(error, DecodingError)
            # Later messages are not read in its place: the error names the truncated one.
            assert f"message {len(around[0]) + 1} of" in str(error), (message, size)
            cases += 1
    assert cases > 300


def forms(source: Captured) -> dict[tuple[Any, ...], int]:
    """The number of the first message of every form: its type and, for a row, its table and its first letter."""
    found: dict[tuple[Any, ...], int] = {}
    known = {version.oid for version in source.versions}
    for number, message in enumerate(source.messages):
        is_row = message[:1] in b"IUD"
        if is_row and int.from_bytes(message[1:5], "big") not in known:
            continue  # the rows of other tables are not read
        found.setdefault((message[:1], *((message[1:5], message[5:6]) if is_row else ())), number)
    return found


def surroundings(source: Captured, number: int) -> tuple[Batch, Batch]:
    """The messages that a message needs before and after it: descriptions of tables, and its transaction."""
    message = source.messages[number]
    relations = [one for one in source.messages[:number] if one[:1] == b"R"]
    if message[:1] in b"IUDTO" or (message[:1] == b"M" and message[1] == 1):
        return [*relations, begin(1, 7)], [commit(1, 2)]
    if message[:1] in (b"C", b"P"):
        last = max(place for place in range(number) if source.messages[place][:1] in (b"B", b"b"))
        return [source.messages[last]], []
    return [], []


def test_altered_messages_are_refused_or_decoded_as_the_reference_reads_them(source: Captured) -> None:
    seconds = SOAK_SECONDS / 3 if SOAK_SECONDS else SHORT_SECONDS / 3
    print(f"CUTLINE_SEED={SEED}")  # noqa: T201  # shown when the test fails
    chance = random.Random(SEED)
    pieces = list(split_transactions(source))
    until = time.monotonic() + seconds
    cases, whole = 0, 0
    while time.monotonic() < until:
        messages = list(chance.choice(pieces))
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            alter(messages, chance)
        whole += check(source, messages, divide(messages, chance))
        cases += 1
    print(f"{cases} altered batches of {source.name}, {whole} of them decoded")  # noqa: T201
    # The test shows nothing unless both happen.
    assert 0 < whole < cases


def split_transactions(source: Captured) -> Iterator[Batch]:
    """The messages in pieces of a few transactions, each after the descriptions of tables that apply to it."""
    described: dict[bytes, bytes] = {}
    piece: Batch = []
    before: Batch = []
    for message in source.messages:
        piece.append(message)
        if message[:1] in (b"C", b"P") and len(piece) > 8:
            yield [*before, *piece]
            described |= {one[1:5]: one for one in piece if one[:1] == b"R"}
            before, piece = list(described.values()), []
    yield [*before, *piece]


def divide(messages: Batch, chance: random.Random) -> list[Batch]:
    """The messages as one batch or several."""
    cuts = sorted(chance.randrange(len(messages) + 1) for _ in range(chance.choice((0, 0, 1, 3)))) if messages else []
    return [messages[low:high] for low, high in zip([0, *cuts], [*cuts, len(messages)], strict=True)]


def alter(messages: Batch, chance: random.Random) -> None:
    """Damage the messages in one way, as a fault in transit could."""
    if not messages:
        return
    number = chance.randrange(len(messages))
    message = bytearray(messages[number])
    place = chance.randrange(len(message) + 1)
    other = chance.choice(messages)
    match chance.randrange(11):
        case 0:
            del message[place:]
        case 1 if place < len(message):
            message[place] ^= 1 << chance.randrange(8)
        case 2 if place < len(message):
            message[place] = chance.choice(LETTERS)
        case 3:
            size = chance.choice((1, 2, 4, 8))
            message[place : place + size] = (chance.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "big")
        case 4:
            message[place:place] = chance.randbytes(chance.randrange(1, 9))
        case 5:
            del message[place : place + chance.randrange(1, 9)]
        case 6:
            message[place:] = other[min(place, len(other)) :]
        case 7:
            messages.insert(chance.randrange(len(messages) + 1), messages[number])
            return
        case 8:
            del messages[number]
            return
        case 9:
            second = chance.randrange(len(messages))
            messages[number], messages[second] = messages[second], messages[number]
            return
        case _:
            message[place : place + 4] = other[place : place + 4]
    messages[number] = bytes(message)


def test_a_message_with_an_extra_byte_is_refused(source: Captured) -> None:
    """What is decoded never depends on the bytes that follow a message in memory."""
    for number in forms(source).values():
        before, after = surroundings(source, number)
        message = source.messages[number]
        for byte in (b"\0", b"t", b"\xff"):
            batch = [*before, message + byte, *after]
            assert read_reference(source, batch) is None
            found, error = decode(source, [batch])
            assert not found
            assert error is not None
