"""Read pg_dump's archive of a database's DDL, and write archives with changed statements or only some of the entries.

The format is defined in PostgreSQL's src/bin/pg_dump (pg_backup_archiver.c, WriteHead and WriteToc;
pg_backup_custom.c). An archive that contains only DDL consists of a header and a table of contents. An entry's type,
name, owner, statements and dependencies are separate values, so there is no need to search the text of a statement.
Texts are raw (nodes.encodings).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.record import Record
from cutline.nodes.encodings import raw_bytes, raw_text

MAGIC, CUSTOM, INTEGER_BYTES, OFFSET_BYTES = b"PGDMP", 1, 4, 8
# A sign and a little-endian value.
INTEGER = struct.Struct("<BI")
# In version 1.14, an entry contains lengths and numbers, at least a digit for each of two ids, and a data offset.
ENTRY_BYTES_MIN = 16 * INTEGER.size + 2 + 1 + OFFSET_BYTES
# PostgreSQL 12, 16 and 17 introduced these versions of the format.
VERSIONS = _, WITH_ALGORITHM, WITH_RELATION_KIND = (1, 14), (1, 15), (1, 16)
DATE_PARTS = 7
# The entries in an archive that pg_restore always reads, even if it runs only a few others.
SETTINGS = ("ENCODING", "STDSTRINGS", "SEARCHPATH")
FOREIGN_KEY, PRIVILEGES, EXTENSION, SEQUENCE = "FK CONSTRAINT", "ACL", "EXTENSION", "SEQUENCE"
TABLE, CONSTRAINT = "TABLE", "CONSTRAINT"
# Two sections, and the mark of an entry without data.
BEFORE_ROWS, AFTER_ROWS, NO_DATA = 2, 4, 3


ENDS_EARLY, NOT_UNIQUE = "it ends early", "its entry numbers are not unique"


class DumpFormatError(ValueError):
    """The bytes are not a pg_dump archive, or its version is unknown."""


class ArchiveEntry(Record, frozen=True):
    """An entry in the table of contents. `kind`, `name` and `schema` are as pg_dump writes them, without quotes.

    `catalog` and `oid` identify the object on the source. `tablespace` is "" for the database's default. `section` is
    BEFORE_ROWS or AFTER_ROWS; any other number means the section of the previous entry. `owner` is "" if there is no
    owner. The offsets in the archive are `begin` and `end` for the statements, `owner_begin` and `owner_end` for the
    owner, and `entry_begin` and `entry_end` for the whole entry.
    """

    number: int
    kind: str
    name: str
    schema: str
    catalog: int
    oid: int
    section: int
    dependencies: tuple[int, ...]
    begin: int
    end: int
    owner: str
    owner_begin: int
    owner_end: int
    tablespace: str
    access: str
    entry_begin: int
    entry_end: int


class Contents(Struct, frozen=True):
    """The contents of an archive; `writer` is pg_dump's major version, `count_at` the offset of the entry count.

    `server` is the version of the server that was dumped, such as `18.1 (Debian 18.1-1)`.
    """

    version: tuple[int, int]
    writer: int
    count_at: int
    entries: tuple[ArchiveEntry, ...]
    server: str = ""


class DdlArchive(Struct, frozen=True):
    """An archive and its contents, which are read only once: a fleet's DDL may have 100,000 entries."""

    body: bytes
    contents: Contents

    @classmethod
    def of(cls, body: bytes) -> DdlArchive:
        """Read the archive's table of contents; raise DumpFormatError if it can't be read."""
        return cls(body, read_contents(body))


class NewEntry(Struct, frozen=True):
    """An entry that pg_dump did not write, with statements or only a name."""

    kind: str
    name: str
    statements: str = ""


def read_contents(body: bytes) -> Contents:
    """Read the archive's table of contents; raise DumpFormatError if it can't be read."""
    header = read_header(body)
    reader = _Reader(body, header.count_at)
    count = reader.integer()
    entries = _read_entries(body, reader.offset, count, header.version)
    if len({entry.number for entry in entries}) != len(entries) or any(entry.number <= 0 for entry in entries):
        raise DumpFormatError(NOT_UNIQUE)
    return replace(header, entries=entries)


def read_header(body: bytes, size_bytes: int = 0) -> Contents:
    """Read the archive's header alone; raise DumpFormatError if its format is unknown or it can't have its entries.

    If `body` is only the beginning of the archive, `size_bytes` is the size of all of it.
    """
    reader = _Reader(body)
    if reader.take(len(MAGIC)) != MAGIC:
        raise DumpFormatError("it is not a pg_dump archive")
    major, minor, _, integer_bytes, offset_bytes, form = reader.take(6)
    version = major, minor
    if version not in VERSIONS or (integer_bytes, offset_bytes, form) != (INTEGER_BYTES, OFFSET_BYTES, CUSTOM):
        raise DumpFormatError(f"its archive format is unknown: version {major}.{minor}, kind {form}")
    if version < WITH_ALGORITHM:
        reader.integer()
    else:
        reader.take(1)
    for _ in range(DATE_PARTS):
        reader.integer()
    reader.text()
    server = reader.text()
    # For example 18.6, 19devel or 19beta2.
    version_text = reader.text()
    if not (writer := re.match("[0-9]{1,4}", version_text)):
        raise DumpFormatError(f"the pg_dump version that it names is not valid: {version_text!r}")
    count_at = reader.offset
    if (count := reader.integer()) < 0:
        raise DumpFormatError(f"its number of entries is {count}")
    if count * ENTRY_BYTES_MIN > max(len(body), size_bytes) - reader.offset:
        raise DumpFormatError(ENDS_EARLY)
    return Contents(version, int(writer[0]), count_at, (), server)


def _read_entries(  # noqa: C901  # one loop: with a call for each of 8 million values, it takes twice as long
    body: bytes, offset: int, count: int, version: tuple[int, int]
) -> tuple[ArchiveEntry, ...]:
    """Read `count` entries from `offset` on; raise DumpFormatError."""
    integer, unpack = INTEGER.size, INTEGER.unpack_from
    # The names of kinds, schemas, owners and the like are few.
    texts: dict[bytes, str] = {b"": ""}
    entries: list[ArchiveEntry] = []
    names_before, names_after = range(4), range(3)  # catalog, oid, name, kind; schema, tablespace, access method
    other_statements = range(2)  # those that would drop the object and copy its rows
    try:
        for _ in range(count):
            entry_begin = offset
            sign, number = unpack(body, offset)
            _, has_data = unpack(body, offset + integer)
            offset += 2 * integer
            if sign or has_data:
                raise DumpFormatError(f"entry {number} contains data" if has_data else NOT_UNIQUE)
            values: list[bytes] = []
            for _ in names_before:
                sign, size = unpack(body, offset)
                offset += integer
                if sign:
                    size = 0
                values.append(body[offset : offset + size])
                offset += size
            sign, section = unpack(body, offset)
            begin = offset = offset + integer
            missing, size = unpack(body, offset)
            end = offset = offset + (integer if missing else integer + size)
            for _ in other_statements:
                missing, size = unpack(body, offset)
                offset += integer if missing else integer + size
            for _ in names_after:
                missing, size = unpack(body, offset)
                offset += integer
                if missing:
                    size = 0
                values.append(body[offset : offset + size])
                offset += size
            if version >= WITH_RELATION_KIND:
                offset += integer
            owner_begin = offset
            missing, size = unpack(body, offset)
            offset += integer
            if missing:
                size = 0
            owner = body[offset : offset + size]
            owner_end = offset = offset + size
            # Whether the table has OIDs, as in PostgreSQL 11.
            missing, size = unpack(body, offset)
            offset += integer if missing else integer + size
            dependencies: list[int] = []
            while True:
                missing, size = unpack(body, offset)
                offset += integer
                if missing:
                    break
                dependencies.append(_digits(body[offset : offset + size]))
                offset += size
            offset += 1 + OFFSET_BYTES
            catalog, oid, name, kind, schema, tablespace, access = values
            for text in (kind, schema, tablespace, access, owner):
                if text not in texts:
                    texts[text] = raw_text(text)
            entries.append(
                ArchiveEntry(
                    number, texts[kind], raw_text(name), texts[schema], _digits(catalog), _digits(oid),
                    -section if sign else section, tuple(dependencies), begin, end, texts[owner], owner_begin,
                    owner_end, texts[tablespace], texts[access], entry_begin, offset,
                )
            )  # fmt: skip
    except struct.error:
        raise DumpFormatError(ENDS_EARLY) from None
    if offset > len(body):
        raise DumpFormatError(ENDS_EARLY)
    return tuple(entries)


def statements_of_entry(body: bytes, entry: ArchiveEntry) -> str:
    """Return the statements that create the entry's object."""
    return _Reader(body, entry.begin).text()


def rewrite(
    body: bytes,
    contents: Contents,
    statements: Mapping[int, str],
    first: Sequence[NewEntry] = (),
    owners: Mapping[int, str] | None = None,
) -> bytes:
    """Replace entries' statements and owners, by entry number, and insert the entries `first` at the beginning."""
    number = max((entry.number for entry in contents.entries), default=0)
    begin = _Reader(body, contents.count_at)
    count = begin.integer()
    pieces = [body[: contents.count_at], _integer(count + len(first))]
    pieces += [_new_entry(number + added, entry, contents.version) for added, entry in enumerate(first, 1)]
    done = begin.offset
    for entry in contents.entries:
        if entry.number in statements:
            pieces += [body[done : entry.begin], _string(statements[entry.number])]
            done = entry.end
        if owners and entry.number in owners:
            pieces += [body[done : entry.owner_begin], _string(owners[entry.number])]
            done = entry.owner_end
    return b"".join([*pieces, body[done:]])


def extract(body: bytes, contents: Contents, entries: Iterable[ArchiveEntry | NewEntry]) -> bytes:
    """Return an archive that contains only `entries`, from `contents` or new, in the given order."""
    settings = (entry for entry in contents.entries if entry.kind in SETTINGS)
    number = max((entry.number for entry in contents.entries), default=0)
    pieces: list[bytes] = []
    for entry in (*settings, *entries):
        if isinstance(entry, NewEntry):
            number += 1
            pieces.append(_new_entry(number, entry, contents.version))
        else:
            pieces.append(body[entry.entry_begin : entry.entry_end])
    return b"".join([body[: contents.count_at], _integer(len(pieces)), *pieces])


def _new_entry(number: int, entry: NewEntry, version: tuple[int, int]) -> bytes:
    none = _integer(-1)
    pieces = [
        _integer(number),
        _integer(0),
        _string("0"),
        _string("0"),
        _string(entry.name),
        _string(entry.kind),
        # The entry has no DROP or COPY statement, no schema, no tablespace and no access method.
        _integer(BEFORE_ROWS),
        _string(entry.statements),
        _string(""),
        none,
        none,
        none,
        none,
    ]
    if version >= WITH_RELATION_KIND:
        pieces.append(_integer(0))
    pieces += [_string(""), _string("false"), none, bytes([NO_DATA]), bytes(OFFSET_BYTES)]
    return b"".join(pieces)


class NumberedEntry(Protocol):
    """An entry in an archive, and the entries that it needs."""

    @property
    def number(self) -> int:
        """The number that identifies the entry."""

    @property
    def dependencies(self) -> tuple[int, ...]:
        """The numbers of the entries that this entry needs."""


def with_dependents(entries: Iterable[NumberedEntry], numbers: Iterable[int]) -> set[int]:
    """Add the numbers of all entries that depend on entries in `numbers`, directly or indirectly."""
    dependents: dict[int, list[int]] = {}
    for entry in entries:
        for dependency in entry.dependencies:
            dependents.setdefault(dependency, []).append(entry.number)
    found: set[int] = set()
    due = list(numbers)
    while due:
        number = due.pop()
        if number not in found:
            found.add(number)
            due += dependents.get(number, ())
    return found


def _integer(value: int) -> bytes:
    return bytes([value < 0]) + abs(value).to_bytes(INTEGER_BYTES, "little")


def _string(text: str) -> bytes:
    body = raw_bytes(text)
    return _integer(len(body)) + body


def _digits(body: bytes | None) -> int:
    if not body or len(body) > len(str(1 << 32)) or not body.isdigit():
        raise DumpFormatError("an entry number is invalid")
    return int(body)


class _Reader(Struct):
    body: bytes
    offset: int = 0

    def take(self, size: int) -> bytes:
        taken = self.body[self.offset : self.offset + size]
        if len(taken) < size:
            raise DumpFormatError(ENDS_EARLY)
        self.offset += size
        return taken

    def integer(self) -> int:
        try:
            value: int
            sign, value = INTEGER.unpack_from(self.body, self.offset)
        except struct.error:
            raise DumpFormatError(ENDS_EARLY) from None
        self.offset += INTEGER.size
        return -value if sign else value

    def string(self) -> bytes | None:
        size = self.integer()
        return None if size < 0 else self.take(size)

    def text(self) -> str:
        return raw_text(self.string() or b"")
