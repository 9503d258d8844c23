"""Stored DDL is read within bounds, whatever it declares or expands to."""

from __future__ import annotations

import struct

import pytest
import zstandard

import cutline.snapshots.ddl.dump as dump
from cutline.snapshots.records.commit import StoredObject
from cutline.wal.segments.damage import ObjectDamagedError
from tests.unit.made_archives import MadeEntry, made_body

ARCHIVE = StoredObject("schema/a/op/archive-0.dump.zst", "archive", "a", 1, "digest", {})
MAGIC, LAST_EMPTY_BLOCK = b"\x28\xb5\x2f\xfd", b"\x01\x00\x00"
TERABYTE = struct.pack("<Q", 1 << 40)
# RFC 8878: descriptor (8 bytes of content size; a single segment, or a window of 1 MiB), sizes, one empty block.
DECLARED = [MAGIC + b"\xe0" + TERABYTE + LAST_EMPTY_BLOCK, MAGIC + b"\xc0\x50" + TERABYTE + LAST_EMPTY_BLOCK]


ENTRY = MadeEntry("TABLE", statements="SELECT 1;\n" * 1000)


def test_an_archive_is_read_as_it_was_written() -> None:
    body = made_body([ENTRY])
    assert dump.read_ddl(zstandard.compress(body), ARCHIVE).body == body
    without_size = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    assert dump.read_ddl(without_size, ARCHIVE).body == body


def test_an_archive_is_read_only_if_its_contents_can_be_read() -> None:
    body = made_body([MadeEntry("TABLE")])
    assert dump.read_ddl(zstandard.compress(body), ARCHIVE).body == body
    for damaged in (body[:-1], b"", b"SELECT 1;"):
        with pytest.raises(ObjectDamagedError, match=r"archive-0\.dump\.zst of node a: it can't be read as DDL"):
            dump.read_ddl(zstandard.compress(damaged), ARCHIVE)


@pytest.mark.parametrize("body", [*DECLARED, b"", b"no frame", zstandard.compress(b"x" * 5000)[:-4]])
def test_a_damaged_archive_is_named_at_once(body: bytes) -> None:
    with pytest.raises(ObjectDamagedError, match=r"archive-0\.dump\.zst of node a: it can't be read as DDL"):
        dump.read_ddl(body, ARCHIVE)


def test_an_archive_that_expands_past_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = made_body([ENTRY])
    monkeypatch.setattr(dump, "DDL_BYTES_MAX", len(body))
    assert dump.read_ddl(zstandard.compress(body), ARCHIVE).body == body
    monkeypatch.setattr(dump, "DDL_BYTES_MAX", len(body) - 1)
    with pytest.raises(ObjectDamagedError, match="it is larger than 0 MiB"):
        dump.read_ddl(zstandard.compress(body), ARCHIVE)
