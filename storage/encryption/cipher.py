"""Authenticated encryption of an object's bytes, in frames that can be read separately.

An object is a sequence of frames and a trailer. Each frame holds FRAME_BYTES of the object (the last frame holds the
rest), encrypted with AES-256-GCM. A frame's nonce consists of its number and a flag that marks the last frame, so
frames can't be swapped, repeated, left out or cut off. The trailer holds the object's salt and the mark of an encrypted
object.

The key of an object is derived (HKDF-SHA256) from the data key, the salt and the object's place in the store: bytes
encrypted for one place are not accepted in another. The salt is a MAC of place and content, so no key ever encrypts two
different contents with the same nonces, even if random numbers repeat. Equal content at the same place gives equal
bytes, so a repeated create recognizes its own object.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from io import BytesIO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cutline.storage.stored_form import ENCRYPTED_END

KEY_BYTES = 32
FRAME_BYTES = 1 << 16
TAG_BYTES = 16
STORED_FRAME_BYTES = FRAME_BYTES + TAG_BYTES
SALT_BYTES = 32
TRAILER_BYTES = SALT_BYTES + len(ENCRYPTED_END)


class NotAuthenticError(ValueError):
    """The bytes were not encrypted with this key for this place."""


@dataclass(frozen=True, slots=True, repr=False)
class Cipher:
    """Encrypts and decrypts objects under keys derived from `data_key`."""

    data_key: bytes

    def encrypt(self, place: str, plain: bytes) -> bytes:
        """Return the stored form of an object; equal arguments give equal bytes."""
        salt = self._salt(place, plain)
        frames = self._object_key(place, salt)
        whole, size = memoryview(plain), stored_size(len(plain))
        # This memory is not touched until it is written to, and it is not copied afterwards: copying takes longer than
        # encryption.
        sink = BytesIO(bytes(size))
        with sink.getbuffer() as stored:
            for number in range(frame_count(len(plain))):
                piece = whole[number * FRAME_BYTES : (number + 1) * FRAME_BYTES]
                is_last = (number + 1) * FRAME_BYTES >= len(plain)
                end = (offset := number * STORED_FRAME_BYTES) + len(piece) + TAG_BYTES
                frames.encrypt_into(_nonce(number, is_last=is_last), piece, None, stored[offset:end])
            stored[size - TRAILER_BYTES :] = salt + ENCRYPTED_END
        return sink.getvalue()

    def decrypt(self, place: str, stored: bytes, start: int = 0) -> bytes:
        """Return an object's content from `start` on.

        `stored` begins at `frame_offset(start)` and ends with the object. Raises NotAuthenticError.
        """
        if not is_encrypted(stored):
            raise NotAuthenticError("is not encrypted")
        whole = memoryview(stored)[:-TRAILER_BYTES]
        frames = self._object_key(place, stored[-TRAILER_BYTES : -len(ENCRYPTED_END)])
        first, size = start // FRAME_BYTES, plain_size(len(stored))
        sink = BytesIO(bytes(size))
        try:
            with sink.getbuffer() as plain:
                for index in range(frame_count(size)):
                    offset, end = index * STORED_FRAME_BYTES, (index + 1) * STORED_FRAME_BYTES
                    nonce = _nonce(first + index, is_last=end >= len(whole))
                    content = plain[index * FRAME_BYTES : (index + 1) * FRAME_BYTES]
                    frames.decrypt_into(nonce, whole[offset:end], None, content)
        except (InvalidTag, ValueError):
            # A ValueError means that the last frame has an impossible size.
            raise NotAuthenticError("was altered, moved or truncated, or was encrypted with another key") from None
        skipped = start - first * FRAME_BYTES
        return sink.getvalue()[skipped:] if skipped else sink.getvalue()

    def _salt(self, place: str, plain: bytes) -> bytes:
        name = place.encode()
        mac = hmac.new(derive_key(self.data_key, b"cutline salt"), len(name).to_bytes(8) + name, "sha256")
        mac.update(plain)
        return mac.digest()

    def _object_key(self, place: str, salt: bytes) -> AESGCM:
        return AESGCM(derive_key(self.data_key, b"cutline object\0" + place.encode(), salt))


def derive_key(key: bytes, purpose: bytes, salt: bytes | None = None) -> bytes:
    """Derive a key of KEY_BYTES for one purpose (HKDF-SHA256)."""
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(key)


def is_encrypted(stored: bytes) -> bool:
    """Whether the bytes end like an encrypted object; nothing is authenticated."""
    return len(stored) >= TRAILER_BYTES + TAG_BYTES and stored.endswith(ENCRYPTED_END)


def frame_count(plain_size: int) -> int:
    """Return the number of frames in an object of `plain_size` bytes; an empty object has one."""
    return max(-(-plain_size // FRAME_BYTES), 1)


def frame_offset(start: int) -> int:
    """Return the offset of the frame that holds byte `start` of the content."""
    return start // FRAME_BYTES * STORED_FRAME_BYTES


def stored_size(plain_size: int) -> int:
    """Return the size of an object of `plain_size` bytes after encryption."""
    return plain_size + frame_count(plain_size) * TAG_BYTES + TRAILER_BYTES


def plain_size(size: int) -> int:
    """Return the inverse of `stored_size`; 0 for a size that no encrypted object can have."""
    frames = size - TRAILER_BYTES
    return max(frames - max(-(-frames // STORED_FRAME_BYTES), 1) * TAG_BYTES, 0)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11) + bytes([is_last])
