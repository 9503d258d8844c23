"""The end of an object as a file of the object's full size, for readers that start at the end of a file."""

from __future__ import annotations

import io


class TailFile(io.RawIOBase):
    """A file of `size` bytes that ends with `tail`; the bytes before read as zeros."""

    def __init__(self, tail: bytes, size: int) -> None:
        super().__init__()
        self._tail, self._size = tail, size
        self._place = 0

    def readable(self) -> bool:
        """Always True."""
        return True

    def seekable(self) -> bool:
        """Always True."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the beginning, from the current position or from the end."""
        self._place = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence] + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes, or all that are left."""
        left = max(self._size - self._place, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        begin = self._place - (self._size - len(self._tail))
        self._place += wanted
        zeros = min(max(-begin, 0), wanted)
        return bytes(zeros) + self._tail[max(begin, 0) : max(begin + wanted, 0)]
