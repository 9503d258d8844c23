"""Archives of pg_dump with entries of the tests' choice, as pg_backup_archiver.c writes version 1.16 of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cutline.nodes.encodings import raw_bytes
from cutline.snapshots.ddl.ddl_archive import Contents, read_contents


@dataclass(frozen=True, slots=True)
class MadeEntry:
    """An entry; its number is its place, from 1."""

    kind: str
    name: str = "t"
    schema: str | None = "m"
    statements: str = "SELECT 1;\n"
    oid: int = 0
    catalog: int = 1259
    section: int = 2
    dependencies: tuple[int, ...] = ()


def integer(value: int) -> bytes:
    return bytes([value < 0]) + abs(value).to_bytes(4, "little")


def string(text: str | None) -> bytes:
    return integer(-1) if text is None else integer(len(raw_bytes(text))) + raw_bytes(text)


def header(version: int = 16, writer: str = "18.6") -> bytes:
    return b"".join([
        b"PGDMP", bytes([1, version, 0, 4, 8, 1]), integer(0) if version < 15 else b"\0",
        *(integer(0) for _ in range(7)), string("source"), string("18.6"), string(writer),
    ])  # fmt: skip


def made_entry(number: int, one: MadeEntry, version: int = 16) -> bytes:
    return b"".join([
        integer(number), integer(0), string(str(one.catalog)), string(str(one.oid)), string(one.name),
        string(one.kind), integer(one.section), string(one.statements), string("DROP"), string(None),
        string(one.schema), string(None), string(None), integer(0) if version > 15 else b"", string("owner"),
        string("false"), *(string(str(dependency)) for dependency in one.dependencies), string(None), b"\3", bytes(8),
    ])  # fmt: skip


def made_body(entries: Sequence[MadeEntry], version: int = 16) -> bytes:
    made = [made_entry(number, one, version) for number, one in enumerate(entries, 1)]
    return b"".join([header(version), integer(len(entries)), *made])


def made_archive(entries: Sequence[MadeEntry]) -> tuple[bytes, Contents]:
    body = made_body(entries)
    return body, read_contents(body)
