"""What stored objects hold compressed with zstd, read back within a limit, whatever it expands to."""

from __future__ import annotations

import zstandard

WINDOW_BYTES_MAX = 128 << 20
# A read of the limit would allocate as much.
PIECE_BYTES = 1 << 20
# How zstd says that it has no room for its buffers.
NO_MEMORY = "not enough memory"


def decompress(body: bytes, bytes_max: int) -> bytes:
    """The content of all frames; raise ValueError if it is larger than `bytes_max` or can't be decompressed.

    It takes memory for what there is, not for the limit or for the size that a frame declares. Raises MemoryError if
    there is too little, which says nothing about the object. Of a last frame that ends early the content is cut off.
    """
    pieces, size = list[bytes](), 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        with decompressor.stream_reader(body, read_across_frames=True) as reader:
            while piece := reader.read(PIECE_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > bytes_max:
                    raise ValueError(f"it is larger than {bytes_max >> 20} MiB")
    except zstandard.ZstdError as error:
        if NO_MEMORY in str(error):
            raise MemoryError(str(error)) from error
        raise ValueError(str(error)) from error
    return b"".join(pieces)
