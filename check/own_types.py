"""The types that users have created, as the stored DDL defines them: enum types, composite types and domains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

from cutline.snapshots.ddl.contradictions import NO_MODIFIER, built_in_type, labels_of
from cutline.snapshots.ddl.described_ddl import Description
from cutline.snapshots.records.chain import Chain

# A domain over a domain, and so on.
DOMAINS_DEEP_MAX = 32


class EnumType(Struct, frozen=True):
    """All labels that the type has had, as COPY prints them."""

    labels: frozenset[bytes]


class CompositeType(Struct, frozen=True):
    """The types of its fields, as format_type prints them: one item for each definition that the type has had."""

    versions: frozenset[tuple[str, ...]]


class DomainType(Struct, frozen=True):
    """A domain over a built-in type: the oid and the modifier of that type."""

    base: int
    modifier: int


OwnType: TypeAlias = EnumType | CompositeType | DomainType
# The own types of columns, by the number of the definition and the column's place in it.
OwnTypes: TypeAlias = Mapping[int, Mapping[int, OwnType]]


def types_of(described: Description) -> dict[int, OwnType]:
    """Return the types that the DDL creates, by oid. A domain over one of the others is as that type."""
    found: dict[int, OwnType] = {oid: EnumType(labels) for oid, labels in labels_of(described).items()}
    found |= {oid: CompositeType(frozenset({fields})) for oid, fields in described.fields.items()}
    for domain in described.bases:
        oid, name = _base_of(domain, described)
        if oid in found:
            found[domain] = found[oid]
        elif (base := built_in_type(name))[0] is not None:
            found[domain] = DomainType(base[0], NO_MODIFIER if base[1] is None else base[1])
    return found


def _base_of(domain: int, described: Description) -> tuple[int, str]:
    """Return the oid of the type that is not a domain, 0 for a built-in type, and its name."""
    oid, name = domain, ""
    # Damaged DDL may have a circle.
    for _ in range(DOMAINS_DEEP_MAX):
        if oid in described.bases:
            name = described.bases[oid]
            oid = described.types.get(name, 0)
    return oid, name


def joined(one: OwnType, other: OwnType) -> OwnType:
    """Return the labels or the lists of fields that a type has had, from two of its definitions."""
    if isinstance(one, EnumType) and isinstance(other, EnumType):
        return EnumType(one.labels | other.labels)
    if isinstance(one, CompositeType) and isinstance(other, CompositeType):
        return CompositeType(one.versions | other.versions)
    # The base of a domain does not change. An oid may have been used for a type of another kind before.
    return other


def own_types(chain: Chain, shard: str, types: Mapping[int, OwnType]) -> dict[int, dict[int, OwnType]]:
    """Return the own types of the columns that the table at the last commit still has, by number and place.

    `types` are keyed by oid. A column that was dropped since may have had a type that no commit has.
    """
    definitions, found = chain.definitions(shard), dict[int, dict[int, OwnType]]()
    for number, at_cut in chain.numbers_at_cut(shard).items():
        kept = {(column.number, column.type_oid) for column in definitions[at_cut].columns}
        of_columns = {
            place: types[column.type_oid]
            for place, column in enumerate(definitions[number].columns)
            if column.type_oid in types and (column.number, column.type_oid) in kept
        }
        if of_columns:
            found[number] = of_columns
    return found
