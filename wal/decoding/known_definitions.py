"""Which definition of its table a decoded change was made under.

A relation message describes a table as it was when the changes after it were made. It is matched by oid, and by all
that it says: name, columns with their types, key, identity. A description that matches no definition is dropped only
where nothing needs it: of a table that is gone, and of one that is copied anew, before the copy. Anywhere else it is a
SchemaMovedError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.hints import NEW_CHAIN
from fleet.tables.groups import Group, SchemaChangedError, table_name
from wal.decoding.pgoutput import Relation
from wal.segments.definitions import Definition

# Past every position.
EVERYWHERE = 1 << 63


class SchemaMovedError(SchemaChangedError):
    """A table was changed under a definition that nobody foresaw. `details`: node, group, oid, and all met at once.

    The driver plans again with the tables in `details["moved"]` copied anew: each has node, group and oid.
    """

    def __init__(self, *, node: str, moved: Iterable[Described]) -> None:
        found = [{"node": node, "group": one.name, "oid": one.oid} for one in moved]
        super().__init__(
            f"node {node}: table {found[0]['group']} was changed under a definition that neither the commit before nor"
            " the catalog has",
            hint=NEW_CHAIN,
            details={**found[0], "moved": found},
        )


@dataclass(frozen=True, slots=True)
class Described:
    """A table that was described: rows belong to `group`, or are dropped if they are before `dropped_before`.

    Rows that are neither are a SchemaMovedError.
    """

    oid: int
    name: str
    group: Group | None
    dropped_before: int


@dataclass(slots=True)
class KnownDefinitions:
    """The definitions of one node's tables; those of one table in the order in which they were made."""

    known: tuple[Definition, ...]
    _of_oid: Mapping[int, tuple[Definition, ...]] = field(init=False)
    _of_name: Mapping[str, tuple[Definition, ...]] = field(init=False)

    def __post_init__(self) -> None:
        of_oid: dict[int, tuple[Definition, ...]] = {}
        of_name: dict[str, tuple[Definition, ...]] = {}
        for version in self.known:
            if version.oid:
                of_oid[version.oid] = (*of_oid.get(version.oid, ()), version)
            else:
                of_name[version.group.name] = (*of_name.get(version.group.name, ()), version)
        self._of_oid, self._of_name = of_oid, of_name

    def described(self, relation: Relation) -> Described:
        """What to make of the rows that follow this relation message."""
        name = table_name(relation.schema, relation.table)
        versions = self._of_oid.get(relation.oid) or self._of_name.get(name, ())
        signature = signature_of(relation)
        for version in reversed(versions):
            if version.group.signature == signature:
                return Described(relation.oid, name, version.group, 0)
        if not versions or any(version.is_gone for version in versions):
            return Described(relation.oid, name, None, EVERYWHERE)
        copied_from = max(version.copied_from or 0 for version in versions)
        return Described(relation.oid, versions[-1].group.name, None, copied_from)


def signature_of(relation: Relation) -> tuple[Any, ...]:
    """What this relation message says, as Group.signature has it."""
    columns = tuple((column.name, column.type_oid, column.type_modifier) for column in relation.columns)
    is_full = relation.replica_identity == "f"
    # Every column is said to be of the key where the whole row is.
    keys = frozenset(column.name for column in relation.columns if column.is_key and not is_full)
    return relation.schema, relation.table, columns, keys, is_full
