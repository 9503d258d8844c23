"""An object as a file that can be read anywhere, for readers that want only some of its bytes."""

from __future__ import annotations

import io

from storage.store import ObjectStore


class RangeFile(io.RawIOBase):
    """The object `key`, `size` bytes long, read by ranges. Nothing is cached."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        super().__init__()
        self._store, self._key, self._size = store, key, size
        self._place = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset from the beginning, from here or from the end."""
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, all that are left without a size."""
        left = max(self._size - self._place, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted == 0:
            return b""
        body = self._store.read_range(self._key, self._place, wanted)
        self._place += len(body)
        return body
