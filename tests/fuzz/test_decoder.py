"""The decoder of pgoutput against bytes that went wrong: an error that names the place, or what the bytes say.

What the bytes say is told by `reference_reader`, which goes value by value. CUTLINE_SOAK=SECONDS goes on for so long;
CUTLINE_SEED=N repeats a run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from columns.bytes_column import from_list
from tests.fuzz.captured import Captured, captured
from tests.fuzz.reference_cursor import RefusedError
from tests.fuzz.reference_reader import Read, Reader
from tests.fuzz.reference_tables import Tables
from tests.pgoutput_messages import begin, commit
from tests.soak import SEED, SOAK_SECONDS
from wal.decoding.decoder import Decoded, Decoder
from wal.decoding.known_definitions import SchemaMovedError
from wal.decoding.pgoutput import DecodingError

SHORT_SECONDS = 6.0
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63)
LETTERS = b"BCbPKrRIUDTMOYSEcApNKOtnub\0\1\xff\\\t"
Batch = list[bytes]


@pytest.fixture(scope="module", params=["made", "15", "18"])
def source(request: pytest.FixtureRequest) -> Captured:
    return captured(request.param)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["lsn"], row["seq"], row["group"], row["op"]))


def decoded(source: Captured, parts: list[Batch]) -> tuple[list[Decoded], Exception | None]:
    """What the decoder makes of these batches, and the error that ended it."""
    decoder = Decoder("n1", source.versions, "exact")
    found: list[Decoded] = []
    for part in parts:
        try:
            found.append(decoder.feed(from_list(part)))
        except (DecodingError, SchemaMovedError) as error:
            return found, error
    return found, None


def said(source: Captured, messages: Batch) -> Read | None:
    try:
        return Reader(Tables(source.versions)).read(messages)
    except RefusedError:
        return None


def check(source: Captured, messages: Batch, parts: list[Batch] | None = None) -> bool:
    """Hold the decoder to the reference; whether it has decoded all."""
    found, error = decoded(source, parts or [messages])
    expected = said(source, messages)
    if error is not None:
        assert "node n1" in str(error)
        assert isinstance(error, SchemaMovedError) or ": message " in str(error)
        assert expected is None, error
        return False
    assert expected is not None, "what is no protocol was decoded"
    changes = pa.concat_tables([one.changes for one in found]).to_pylist()
    events = pa.concat_tables([one.events for one in found]).to_pylist()
    assert ordered(changes) == ordered(expected.changes)
    assert sorted(map(str, events)) == sorted(map(str, expected.events))
    assert max(one.through for one in found) == expected.through
    assert sum(one.ignored for one in found) == expected.ignored
    return True


def test_whole_messages_are_decoded_as_the_manual_reads_them(source: Captured) -> None:
    assert check(source, source.messages)
    kinds = {chr(message[0]) for message in source.messages}
    assert kinds >= set("BCbPKrRIUDTM")


def test_a_message_cut_short_anywhere_is_refused_at_its_place(source: Captured) -> None:
    """Of every kind and form of message, at every byte; what is cut is never decoded."""
    chosen = forms(source)
    if not SOAK_SECONDS:
        chosen = {form: number for form, number in chosen.items() if len(source.messages[number]) < 400}
    cases = 0
    for number in chosen.values():
        around = surroundings(source, number)
        message = source.messages[number]
        for size in range(len(message)):
            batch = [*around[0], message[:size], *around[1]]
            found, error = decoded(source, [batch])
            assert not found
            assert isinstance(error, DecodingError)
            # Later messages are not read for it: the place is that of the one that was cut.
            assert f"message {len(around[0]) + 1} of" in str(error), (message, size)
            cases += 1
    assert cases > 300


def forms(source: Captured) -> dict[tuple[Any, ...], int]:
    """The first message of every kind, of every table of ours and with every letter, by its number."""
    found: dict[tuple[Any, ...], int] = {}
    ours = {version.oid for version in source.versions}
    for number, message in enumerate(source.messages):
        is_row = message[:1] in b"IUD"
        if is_row and int.from_bytes(message[1:5], "big") not in ours:
            continue  # of others' rows nothing is read
        found.setdefault((message[:1], *((message[1:5], message[5:6]) if is_row else ())), number)
    return found


def surroundings(source: Captured, number: int) -> tuple[Batch, Batch]:
    """What must stand before and after a message: the descriptions, and its transaction."""
    message = source.messages[number]
    relations = [one for one in source.messages[:number] if one[:1] == b"R"]
    if message[:1] in b"IUDTO" or (message[:1] == b"M" and message[1] == 1):
        return [*relations, begin(1, 7)], [commit(1, 2)]
    if message[:1] in (b"C", b"P"):
        last = max(place for place in range(number) if source.messages[place][:1] in (b"B", b"b"))
        return [source.messages[last]], []
    return [], []


def test_altered_messages_are_refused_or_decoded_as_they_are(source: Captured) -> None:
    seconds = SOAK_SECONDS / 3 if SOAK_SECONDS else SHORT_SECONDS / 3
    print(f"CUTLINE_SEED={SEED}")  # noqa: T201  # shown when the test fails
    chance = random.Random(SEED)
    pieces = list(transactions(source))
    until = time.monotonic() + seconds
    cases, whole = 0, 0
    while time.monotonic() < until:
        messages = list(chance.choice(pieces))
        for _ in range(chance.choice((1, 1, 1, 2, 5))):
            alter(messages, chance)
        whole += check(source, messages, divided(messages, chance))
        cases += 1
    print(f"{cases} altered batches of {source.name}, {whole} of them decoded")  # noqa: T201
    # Both happen, or nothing is tried.
    assert 0 < whole < cases


def transactions(source: Captured) -> Iterator[Batch]:
    """The messages in pieces of a few transactions, each with the descriptions that hold there."""
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


def divided(messages: Batch, chance: random.Random) -> list[Batch]:
    """The messages as one batch or several."""
    cuts = sorted(chance.randrange(len(messages) + 1) for _ in range(chance.choice((0, 0, 1, 3)))) if messages else []
    return [messages[low:high] for low, high in zip([0, *cuts], [*cuts, len(messages)], strict=True)]


def alter(messages: Batch, chance: random.Random) -> None:
    """Do one thing to the messages that a fault on the way could do."""
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


def test_what_is_decoded_never_depends_on_what_follows_in_memory(source: Captured) -> None:
    """A message is read to its end and no further, whatever comes after it."""
    for number in forms(source).values():
        before, after = surroundings(source, number)
        message = source.messages[number]
        for byte in (b"\0", b"t", b"\xff"):
            batch = [*before, message + byte, *after]
            assert said(source, batch) is None
            found, error = decoded(source, [batch])
            assert not found
            assert error is not None
