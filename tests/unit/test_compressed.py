"""Compressed contents are read back whole, within a limit, and with memory for what there is."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tracemalloc

import pytest
import zstandard

from cutline.snapshots.records.documents import PIECE_BYTES, ManifestError, decompress, has_digest

# Its frame takes 16 kB.
LARGE = 256 << 20
CONTENT = bytes(range(256)) * 9000
LITTLE_MEMORY = f"""
import resource, zstandard
from cutline.snapshots.ddl.dump import read_ddl
from cutline.snapshots.records.commit import StoredObject
from tests.unit.test_compressed import frame_of_zeros
body = frame_of_zeros({LARGE})
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ({LARGE} >> 1),) * 2)
try:
    read_ddl(body, StoredObject("schema/a", "archive", "a", 1, "digest", {{}}))
except MemoryError:
    print("no memory")
"""


def frame_of_zeros(size: int) -> bytes:
    compressor, piece = zstandard.ZstdCompressor().compressobj(), bytes(1 << 20)
    return b"".join([compressor.compress(piece) for _ in range(size >> 20)] + [compressor.flush()])


@pytest.mark.parametrize("content", [b"", b"x", CONTENT, CONTENT[: PIECE_BYTES + 1]])
def test_all_frames_are_read_up_to_the_limit(content: bytes) -> None:
    body = zstandard.compress(b"first\n") + zstandard.compress(content)
    assert decompress(body, len(content) + 6) == b"first\n" + content
    with pytest.raises(ValueError, match=f"it is larger than {(len(content) + 5) >> 20} MiB"):
        decompress(body, len(content) + 5)


@pytest.mark.parametrize("body", [b"no frame", zstandard.compress(CONTENT) + b"more"])
def test_what_is_no_frame_is_damage(body: bytes) -> None:
    with pytest.raises(ValueError, match="zstd"):
        decompress(body, 1 << 30)


def test_memory_is_taken_for_what_there_is_and_not_for_the_limit() -> None:
    """Also of a body that expands past the limit: no more than that and a piece."""
    bomb = frame_of_zeros(64 << 20)
    tracemalloc.start()
    try:
        assert decompress(zstandard.compress(CONTENT), 1 << 40) == CONTENT
        assert tracemalloc.get_traced_memory()[1] < 4 * len(CONTENT)
        tracemalloc.reset_peak()
        with pytest.raises(ValueError, match="it is larger than 4 MiB"):
            decompress(bomb, 4 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def sealed(size: int) -> tuple[bytes, str]:
    """A document of `size` bytes, and its digest."""
    text = b'{"schema":"cutline/odd/1","text":"'
    text += b"x" * (size - len(text) - len('","digest":""}') - 64) + b'"'
    found = hashlib.sha256(text + b"}").hexdigest()
    body = text + f',"digest":"{found}"}}'.encode()
    assert len(body) == size
    return body, found


@pytest.mark.parametrize("size", [200, PIECE_BYTES, *(PIECE_BYTES + more for more in (1, 40, 76, 77, 78)), 3 << 20])
def test_a_document_has_its_digest_wherever_its_pieces_end(size: int) -> None:
    body, found = sealed(size)
    for stored in (body, zstandard.compress(body)):
        assert has_digest("snapshots/key", stored, found)
        assert not has_digest("snapshots/key", stored, found[::-1])
    places = [0, size // 2, size - 78, size - 70, size - 1]
    for changed in (body[:-1], body + b" ", *(body[:at] + b"?" + body[at + 1 :] for at in places)):
        for stored in (changed, zstandard.compress(changed)):
            assert not has_digest("snapshots/key", stored, found)
    assert not has_digest("snapshots/key", zstandard.compress(body)[:-5], found)
    halves = zstandard.compress(body[: size - 40]) + zstandard.compress(body[size - 40 :])
    assert has_digest("snapshots/key", halves, found)
    for short in (b"", body[-78:], body[-77:], body[:70]):
        for stored in (short, zstandard.compress(short)):
            assert not has_digest("snapshots/key", stored, found)
    assert not has_digest("snapshots/key", body, "")
    with pytest.raises(ManifestError, match="object snapshots/key is damaged"):
        has_digest("snapshots/key", zstandard.compress(body) + b"more", found)


def test_the_content_is_not_held_to_compare_its_digest() -> None:
    body, found = sealed(64 << 20)
    stored = zstandard.compress(body)
    del body
    tracemalloc.start()
    try:
        assert has_digest("snapshots/key", stored, found)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_too_little_memory_is_no_damage_of_the_object() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("no memory\n", 0), done
