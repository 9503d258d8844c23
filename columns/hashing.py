"""PostgreSQL's hash functions over whole columns: hashint4, hashint8, hashtext and uuid_hash.

The source is hash_bytes and hash_uint32 in PostgreSQL's src/common/hashfn.c (Bob Jenkins' lookup3), as on a
little-endian server, and hashint8 in src/backend/access/hash/hashfunc.c. Results have the same bits as PostgreSQL's,
but are unsigned.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cutline.columns.bytes_column import Bytes, BytesColumn, Ints

Words = npt.NDArray[np.uint32]

# The initial value of a, b and c, to which the length is added.
SEED = 0x9E3779B9 + 3923095
CHUNK_BYTES, WORD_BYTES = 12, 4


def hash_integers(values: Ints) -> Words:
    """Return hashint8 of every value, which equals hashint2 and hashint4 for values that fit these types."""
    bits = values.view(np.uint64)
    low, high = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
    state = _begin(np.full(len(values), low.itemsize, np.int64))
    state[0] += low ^ np.where(values >= 0, high, ~high)
    return _finish(state)


def hash_values(values: BytesColumn) -> Words:
    """Return hash_any of every value: hashtext for text with a deterministic collation, uuid_hash for 16 bytes."""
    # Padding allows three words to be read at the end of every value.
    data = np.concatenate([values.data, np.zeros(CHUNK_BYTES, np.uint8)])
    # Values with more whole chunks come first, so that those with chunks left are always at the front.
    order = np.argsort(-(values.lengths // CHUNK_BYTES), kind="stable")
    starts, lengths = values.offsets[:-1][order], values.lengths[order]
    whole, state = lengths // CHUNK_BYTES, _begin(lengths)
    for chunk in range(int(whole.max(initial=0))):
        active = int(np.count_nonzero(whole > chunk))
        state[:, :active] = _mix(state[:, :active] + _words_at(data, starts[:active] + chunk * CHUNK_BYTES))
    rest = lengths - whole * CHUNK_BYTES
    words = _words_at(data, starts + whole * CHUNK_BYTES)
    for number, word in enumerate(words):
        word &= _mask(rest - number * WORD_BYTES)
    # The lowest byte of c is reserved for the length.
    words[2] <<= np.uint32(8)
    hashes = np.empty(len(order), np.uint32)
    hashes[order] = _finish(state + words)
    return hashes


def _begin(lengths: Ints) -> Words:
    """Return the initial state of every value, with one row each for a, b and c."""
    return np.tile(((SEED + lengths) & 0xFFFFFFFF).astype(np.uint32), (3, 1))


def _words_at(data: Bytes, starts: Ints) -> Words:
    words = np.zeros((3, len(starts)), np.uint32)
    for byte in range(CHUNK_BYTES):
        words[byte // WORD_BYTES] |= data[starts + byte].astype(np.uint32) << np.uint32(8 * (byte % WORD_BYTES))
    return words


def _mask(count: Ints) -> Words:
    return ((np.int64(1) << 8 * np.clip(count, 0, WORD_BYTES)) - 1).astype(np.uint32)


def _rotate(value: Any, bits: int) -> Any:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _mix(state: Words) -> Words:
    a, b, c = state
    a = (a - c) ^ _rotate(c, 4)
    c = c + b
    b = (b - a) ^ _rotate(a, 6)
    a = a + c
    c = (c - b) ^ _rotate(b, 8)
    b = b + a
    a = (a - c) ^ _rotate(c, 16)
    c = c + b
    b = (b - a) ^ _rotate(a, 19)
    a = a + c
    c = (c - b) ^ _rotate(b, 4)
    return np.stack([a, b + a, c])


def _finish(state: Words) -> Words:
    a, b, c = state
    c = (c ^ b) - _rotate(b, 14)
    a = (a ^ c) - _rotate(c, 11)
    b = (b ^ a) - _rotate(a, 25)
    c = (c ^ b) - _rotate(b, 16)
    a = (a ^ c) - _rotate(c, 4)
    b = (b ^ a) - _rotate(a, 14)
    found: Words = (c ^ b) - _rotate(b, 24)
    return found
