"""Find the table definition under which a decoded change was made.

A relation message describes a table as it was when the changes after it were made. It is compared with the known
definitions by oid and by its whole content: name, columns with their types, key, replica identity. If it does not match
any definition, changes are dropped only if nothing needs them: changes to a dropped table, and changes before the copy
of a table that is copied again. All other changes raise SchemaMovedError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.table_names import table_name
from cutline.nodes.groups import ColumnSignature, Group, SchemaChangedError, Signature
from cutline.storage.errors import ChainEnd
from cutline.wal.decoding.pgoutput import Relation
from cutline.wal.segments.archive import Definition

# Higher than any position.
EVERYWHERE = 1 << 63


class SchemaMovedError(SchemaChangedError):
    """A table was changed under an unknown definition. `details` names the first such table, by node, group and oid.

    `details["moved"]` names all such tables. The driver then makes a new plan and copies the tables again.
    """

    def __init__(self, *, node: str, moved: Iterable[TableDescription]) -> None:
        tables = [{"node": node, "group": description.name, "oid": description.oid} for description in moved]
        super().__init__(
            f"node {node}: table {tables[0]['group']} was changed under a definition that is neither in the last commit"
            " nor in the catalogs",
            hint=NEW_CHAIN,
            ends_chain=ChainEnd.FOR_GOOD,
            details={**tables[0], "moved": tables},
        )


class TableDescription(Struct, frozen=True):
    """How to decode the rows that follow a relation message.

    The rows belong to `group`. If `group` is None, rows before `dropped_before` are dropped, and other rows raise
    SchemaMovedError.
    """

    oid: int
    name: str
    group: Group | None
    dropped_before: int


@dataclass(slots=True)
class KnownDefinitions:
    """The definitions of a node's tables; each table's definitions are in the order in which they took effect."""

    known: tuple[Definition, ...]
    _of_oid: Mapping[int, tuple[Definition, ...]] = field(init=False)
    _of_name: Mapping[str, tuple[Definition, ...]] = field(init=False)

    def __post_init__(self) -> None:
        # Of many thousands of tables, nearly all have one definition.
        of_oid = {definition.oid: (definition,) for definition in self.known}
        of_name: dict[str, tuple[Definition, ...]] = {}
        if len(of_oid) == len(self.known) and 0 not in of_oid:
            self._of_oid, self._of_name = of_oid, of_name
            return
        of_oid = {}
        for definition in self.known:
            if definition.oid:
                of_oid[definition.oid] = (*of_oid.get(definition.oid, ()), definition)
            else:
                of_name[definition.group.name] = (*of_name.get(definition.group.name, ()), definition)
        self._of_oid, self._of_name = of_oid, of_name

    def describe(self, relation: Relation) -> TableDescription:
        """Decide what to do with the rows that follow this relation message."""
        name = table_name(relation.schema, relation.table)
        definitions = self._of_oid.get(relation.oid) or self._of_name.get(name, ())
        signature = signature_of(relation)
        for definition in reversed(definitions):
            if definition.group.signature == signature:
                return TableDescription(relation.oid, name, definition.group, 0)
        if not definitions or any(definition.is_gone for definition in definitions):
            return TableDescription(relation.oid, name, None, EVERYWHERE)
        copied_from = max(definition.copied_from or 0 for definition in definitions)
        return TableDescription(relation.oid, definitions[-1].group.name, None, copied_from)


def signature_of(relation: Relation) -> Signature:
    """Return the content of a relation message in the same form as Group.signature."""
    columns = tuple(
        ColumnSignature(relation_column.name, relation_column.type_oid, relation_column.type_modifier)
        for relation_column in relation.columns
    )
    is_full = relation.replica_identity == "f"
    # With REPLICA IDENTITY FULL, every column is flagged as part of the key.
    keys = frozenset(column.name for column in relation.columns if column.is_key and not is_full)
    return Signature(relation.schema, relation.table, columns, keys, is_full)
