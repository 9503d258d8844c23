"""The group of a message's table, by the last description of its oid. Part of the reference reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cutline.nodes.groups import Group
from cutline.wal.segments.archive import Definition
from tests.fuzz.reference_cursor import Cursor, RefusedError

MOVED = "moved"


@dataclass(slots=True)
class Tables:
    """A node's tables; `described` by oid: the group, None if unknown, MOVED if no definition of the oid matches."""

    versions: Sequence[Definition]
    described: dict[int, Group | str | None] = field(default_factory=dict)

    def describe(self, cursor: Cursor) -> None:
        """Read a Relation message."""
        oid, schema, table, identity = cursor.number(4), cursor.name(), cursor.name(), cursor.take(1)
        columns = []
        for _ in range(cursor.number(2)):
            flags, name = cursor.number(1), cursor.name()
            if flags > 1:
                raise RefusedError("flags")
            columns.append((flags, name, cursor.number(4), cursor.number(4, signed=True)))
        if identity not in (b"d", b"n", b"f", b"i"):
            raise RefusedError("identity")
        known = [version for version in self.versions if version.oid == oid]
        self.described[oid] = MOVED if known else None
        for version in known:
            group = version.group
            described = sorted(group.columns, key=lambda column: column.position)
            keys = {column.name for column in group.columns[: group.key_width]}
            if (
                (group.schema, group.table) == (schema or "pg_catalog", table)
                and [(c.name, c.type_oid, c.type_modifier) for c in described] == [column[1:] for column in columns]
                and (group.identity == "full") == (identity == b"f")
                and (identity == b"f" or keys == {name for flags, name, _, _ in columns if flags})
            ):
                self.described[oid] = group

    def group(self, oid: int) -> Group | None:
        """The group of the oid, None if it is unknown."""
        if oid not in self.described:
            raise RefusedError("no Relation message has described it")
        found = self.described[oid]
        if isinstance(found, str):
            raise RefusedError(found)
        return found
