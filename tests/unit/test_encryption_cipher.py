"""The stored form of encrypted objects, as docs/encryption.md describes it, and what is refused.

The expected form is built here from the description: the primitives are the same library's, the rest is its own.
"""

from __future__ import annotations

import hashlib
import hmac

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cutline.storage.encryption.cipher import Cipher, NotAuthenticError, frame_offset, plain_size, stored_size

FRAME, TAG, TRAILER = 65_536, 16, 40
DATA_KEY = bytes(range(32))
PLACE = "snapshots/nightly/base/s1/part-0.parquet"
SIZES = [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 3 * FRAME + 7]


def content(size: int) -> bytes:
    return hashlib.shake_128(b"content").digest(size)


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 with SHA-256, one block."""
    extracted = hmac.new(salt or bytes(32), key, "sha256").digest()
    return hmac.new(extracted, info + b"\x01", "sha256").digest()


def described(place: str, body: bytes) -> bytes:
    """What docs/encryption.md says that is stored."""
    name = place.encode()
    salt = hmac.new(hkdf(DATA_KEY, b"", b"cutline salt"), len(name).to_bytes(8, "big") + name + body, "sha256").digest()
    object_key = AESGCM(hkdf(DATA_KEY, salt, b"cutline object\0" + name))
    pieces = [body[at : at + FRAME] for at in range(0, len(body), FRAME)] or [b""]
    frames = [
        object_key.encrypt(number.to_bytes(11, "big") + (b"\x01" if number == len(pieces) - 1 else b"\0"), piece, None)
        for number, piece in enumerate(pieces)
    ]
    return b"".join(frames) + salt + b"cutline\x01"


def refused(stored: bytes, place: str = PLACE, key: bytes = DATA_KEY, start: int = 0) -> None:
    with pytest.raises(NotAuthenticError):
        Cipher(key).decrypt(place, stored, start)


@pytest.mark.parametrize("size", SIZES)
def test_the_stored_form_is_the_one_described(size: int) -> None:
    body = content(size)
    stored = Cipher(DATA_KEY).encrypt(PLACE, body)
    assert stored == described(PLACE, body)
    assert Cipher(DATA_KEY).decrypt(PLACE, stored) == body
    assert (stored_size(size), plain_size(len(stored))) == (len(stored), size)


@pytest.mark.parametrize("size", SIZES)
def test_the_end_is_read_from_any_offset(size: int) -> None:
    body = content(size)
    stored = described(PLACE, body)
    for start in {0, 1, size // 2, max(size - 1, 0), min(FRAME, max(size - 1, 0))}:
        assert Cipher(DATA_KEY).decrypt(PLACE, stored[frame_offset(start) :], start) == body[start:]


def test_other_content_or_another_place_shares_no_bytes() -> None:
    stored = [Cipher(DATA_KEY).encrypt(place, body) for place, body in (("a", b"x" * 64), ("b", b"x" * 64))]
    stored.append(Cipher(DATA_KEY).encrypt("a", b"x" * 63 + b"y"))
    for position in range(0, 64, 8):
        assert len({one[position : position + 8] for one in stored}) == 3


def test_every_changed_byte_is_refused() -> None:
    stored = described(PLACE, content(100))
    for position in range(len(stored)):
        refused(stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :])


def test_what_is_cut_extended_or_out_of_order_is_refused() -> None:
    step = FRAME + TAG
    stored = described(PLACE, content(3 * FRAME))
    frames = [stored[at : at + step] for at in range(0, 3 * step, step)]
    trailer = stored[-TRAILER:]
    for changed in (frames[:2], frames[1:], [frames[1], frames[0], frames[2]], [*frames, frames[2]], frames[2:], []):
        refused(b"".join(changed) + trailer)
    for changed in (stored[:-1], stored + b"x", b"", b"x" * 100, stored[:-TRAILER], stored[1:]):
        refused(changed)


def test_a_tail_at_another_offset_is_refused() -> None:
    stored = described(PLACE, content(3 * FRAME))
    refused(stored[frame_offset(FRAME) :], start=2 * FRAME)
    refused(stored[frame_offset(2 * FRAME) :], start=FRAME)


def test_another_place_and_another_key_are_refused() -> None:
    stored = described(PLACE, content(100))
    refused(stored, place=PLACE + "x")
    refused(stored, key=bytes(32))


def test_a_frame_of_another_object_is_refused() -> None:
    step = FRAME + TAG
    one, other = described(PLACE, content(2 * FRAME)), described(PLACE, b"y" * 2 * FRAME)
    refused(one[:step] + other[step:])
