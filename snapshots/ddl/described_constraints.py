"""Describe the constraints in a stored DDL archive that rows have to satisfy together or alone.

Only forms are read whose meaning follows from the text of a row's values: keys of plain columns, foreign keys, the
bounds of partitions, and CHECK constraints as text. Constraints that the server does not guarantee (NOT VALID, NOT
ENFORCED) are left out, and so are partial indexes, expressions, and operator classes other than the default.
pg_dump writes one entry for each object and quotes all identifiers (pg_dump.c; ruleutils.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from msgspec import Struct, field

from cutline.snapshots.ddl.ddl_archive import (
    CONSTRAINT,
    FOREIGN_KEY,
    TABLE,
    ArchiveEntry,
    DdlArchive,
    statements_of_entry,
)
from cutline.snapshots.ddl.described_ddl import INDEX
from cutline.snapshots.ddl.quoted_names import QUOTED, Name, read_name, shown
from cutline.snapshots.ddl.statement_lists import list_items

NAMES = rf"{QUOTED}(?:, {QUOTED})*"
UNIQUE = re.compile(
    rf"ALTER TABLE ONLY ({QUOTED})\.({QUOTED})\s+ADD CONSTRAINT ({QUOTED})"
    rf" (?:PRIMARY KEY|UNIQUE( NULLS NOT DISTINCT)?) \(({NAMES})\)"
)
# An item with an operator class other than the default, or with an expression, has another form.
ITEM = rf"{QUOTED}(?: COLLATE {QUOTED}(?:\.{QUOTED})?)?(?: DESC)?(?: NULLS (?:FIRST|LAST))?"
UNIQUE_INDEX = re.compile(
    rf'CREATE UNIQUE INDEX ({QUOTED}) ON ({QUOTED})\.({QUOTED}) USING "btree" \(({ITEM}(?:, {ITEM})*)\)'
    rf"(?: INCLUDE \({NAMES}\))?( NULLS NOT DISTINCT)?(?: WITH \([^()]*\))?(?: TABLESPACE {QUOTED})?;"
)
REFERENCE = re.compile(
    rf"ALTER TABLE (?:ONLY )?({QUOTED})\.({QUOTED})\s+ADD CONSTRAINT ({QUOTED})"
    rf" FOREIGN KEY \(({NAMES})\) REFERENCES ({QUOTED})\.({QUOTED})\(({NAMES})\)((?:[^;\"]|{QUOTED})*);"
)
OTHER_KEY = re.compile(r"ADD CONSTRAINT  (?:UNIQUE|PRIMARY KEY|EXCLUDE)\b")
NOT_GUARANTEED = re.compile(r"\bNOT (?:VALID|ENFORCED)\b")
ATTACH = re.compile(
    rf"ALTER TABLE ONLY ({QUOTED})\.({QUOTED}) ATTACH PARTITION ({QUOTED})\.({QUOTED})\s+(.*);\s*$",
    re.DOTALL,
)
PARTITION_KEY = re.compile(rf"\nPARTITION BY (RANGE|LIST) \(({NAMES})\);")
LITERAL = r"'(?:[^']|'')*'"
VALUE = rf"(?:{LITERAL}|-?[0-9]+|NULL|MINVALUE|MAXVALUE)"
VALUES = rf"{VALUE}(?:, {VALUE})*"
RANGE_BOUND = re.compile(rf"FOR VALUES FROM \(({VALUES})\) TO \(({VALUES})\)")
LIST_BOUND = re.compile(rf"FOR VALUES IN \(({VALUES})\)")
TABLE_CHECK = re.compile(rf"CONSTRAINT ({QUOTED}) CHECK (\(.*\))(?: NO INHERIT)?$", re.DOTALL)
DOMAIN = re.compile(rf"CREATE DOMAIN ({QUOTED})\.({QUOTED}) AS (.*?)(?=\n\tCONSTRAINT |;\s*$)", re.DOTALL)
DOMAIN_CHECK = re.compile(rf"\n\tCONSTRAINT ({QUOTED}) CHECK (\((?:{LITERAL}|{QUOTED}|[^'\"\n])*\))(?=\n|;)")
# A collation of the server's own is deterministic.
OWN_COLLATION = re.compile(rf"\bCOLLATE (?!\"pg_catalog\"\.){QUOTED}")
TABLE_ATTACH, DOMAIN_KIND, TYPE_KIND = "TABLE ATTACH", "DOMAIN", "TYPE"

# A bound's value: text, NULL (None), or the end of all values.
SMALLEST, LARGEST = "MINVALUE", "MAXVALUE"
BoundValue: TypeAlias = str | None


class UniqueKey(Struct, frozen=True):
    """Columns whose values occur once in a table. Unless `counts_nulls`, rows with a NULL in them don't count."""

    name: str
    table: Name
    columns: tuple[str, ...]
    counts_nulls: bool = False


class ForeignKey(Struct, frozen=True):
    """Columns of a table whose values, unless one is NULL, are values of the columns of the referenced table."""

    name: str
    table: Name
    columns: tuple[str, ...]
    referenced: Name
    referenced_columns: tuple[str, ...]


class RangeBound(Struct, frozen=True):
    """The values of a partition's columns: from `low`, to before `high`. Each is a constant, SMALLEST or LARGEST."""

    low: tuple[str, ...]
    high: tuple[str, ...]


class ListBound(Struct, frozen=True):
    """The values of a partition's column."""

    values: frozenset[BoundValue]


class Attached(Struct, frozen=True):
    """A partition's parent; `bound` is None if it is the default, or of a kind or with values that are not read."""

    parent: Name
    bound: RangeBound | ListBound | None


class Check(Struct, frozen=True):
    """A CHECK constraint of a table or domain: its expression in parentheses, as the DDL has it."""

    name: str
    expression: str


class Domain(Struct, frozen=True):
    """A domain: the type that it is made of, as the DDL has it, without quotes, and its constraints."""

    base: str
    checks: tuple[Check, ...]


class Constraints(Struct, frozen=True):
    """The constraints in a shard's DDL.

    `partitioned` maps a partitioned table to its columns, if they are plain and it is divided by RANGE or LIST, and
    `attached` each partition to its parent. `checks` are keyed by table. `others` is the number of unique indexes,
    foreign keys, and unique and exclusion constraints that have another form. If `has_own_collations`, equal texts may
    have other bytes.
    """

    unique: tuple[UniqueKey, ...] = ()
    references: tuple[ForeignKey, ...] = ()
    partitioned: Mapping[Name, tuple[Literal["RANGE", "LIST"], tuple[str, ...]]] = field(default_factory=dict)
    attached: Mapping[Name, Attached] = field(default_factory=dict)
    checks: Mapping[Name, tuple[Check, ...]] = field(default_factory=dict)
    domains: Mapping[Name, Domain] = field(default_factory=dict)
    others: int = 0
    has_own_collations: bool = False

    def leaves(self, table: Name) -> tuple[Name, ...]:
        """Return the partitions below a table that are not divided further, or the table itself if it has none."""
        found, above = list[Name](), [table]
        children: dict[Name, list[Name]] = {}
        for name, attached in self.attached.items():
            children.setdefault(attached.parent, []).append(name)
        while above:
            name = above.pop()
            # Taken out, so that a circle, which no server makes, ends.
            below = children.pop(name, [])
            above += below
            found += [name] if not below else []
        return tuple(found)


def describe_constraints(archive: DdlArchive) -> Constraints:
    """Read the constraints from the statements in an archive."""
    reader = _ConstraintReader()
    for entry in archive.contents.entries:
        reader.add(entry, statements_of_entry(archive.body, entry))
    return Constraints(
        tuple(reader.unique),
        tuple(reader.references),
        reader.partitioned,
        reader.attached,
        {table: tuple(checks) for table, checks in reader.checks.items()},
        reader.domains,
        reader.others,
        reader.has_own_collations,
    )


class _ConstraintReader(Struct):
    """The constraints in the entries of an archive that were read so far."""

    unique: list[UniqueKey] = field(default_factory=list)
    references: list[ForeignKey] = field(default_factory=list)
    partitioned: dict[Name, tuple[Literal["RANGE", "LIST"], tuple[str, ...]]] = field(default_factory=dict)
    attached: dict[Name, Attached] = field(default_factory=dict)
    checks: dict[Name, list[Check]] = field(default_factory=dict)
    domains: dict[Name, Domain] = field(default_factory=dict)
    others: int = 0
    has_own_collations: bool = False

    def add(self, entry: ArchiveEntry, text: str) -> None:
        """Read an entry."""
        if entry.kind == CONSTRAINT:
            self._add_unique(text)
        elif entry.kind == INDEX:
            self._add_index(text)
        elif entry.kind == FOREIGN_KEY:
            self._add_reference(text)
        elif entry.kind == TABLE_ATTACH:
            self._add_partition(text)
        elif entry.kind == TABLE:
            self._add_table((shown(entry.schema), shown(entry.name)), text)
        elif entry.kind == DOMAIN_KIND:
            self._add_domain(text)
        if entry.kind in (TABLE, DOMAIN_KIND, TYPE_KIND) and OWN_COLLATION.search(text):
            self.has_own_collations = True

    def _add_unique(self, text: str) -> None:
        if match := UNIQUE.match(text):
            schema, table, name, counts_nulls, columns = match.groups()
            self.unique.append(
                UniqueKey(read_name(name), _names_of(schema, table), _columns(columns), bool(counts_nulls))
            )
        elif OTHER_KEY.search(re.sub(QUOTED, "", text)):
            self.others += 1

    def _add_index(self, text: str) -> None:
        if match := UNIQUE_INDEX.match(text):
            name, schema, table, items, counts_nulls = match.groups()
            columns = tuple(read_name(item) for item in _leading_names(items))
            self.unique.append(UniqueKey(read_name(name), _names_of(schema, table), columns, bool(counts_nulls)))
        elif text.startswith("CREATE UNIQUE INDEX "):
            self.others += 1

    def _add_reference(self, text: str) -> None:
        match = REFERENCE.match(text)
        if match and not NOT_GUARANTEED.search(re.sub(QUOTED, "", match[8])):
            schema, table, name, columns, other_schema, other, other_columns, _ = match.groups()
            self.references.append(
                ForeignKey(
                    read_name(name), _names_of(schema, table), _columns(columns),
                    _names_of(other_schema, other), _columns(other_columns),
                )
            )  # fmt: skip
        elif not match:
            self.others += 1

    def _add_partition(self, text: str) -> None:
        if match := ATTACH.match(text):
            schema, parent, own_schema, own, bound = match.groups()
            self.attached[_names_of(own_schema, own)] = Attached(_names_of(schema, parent), read_bound(bound))

    def _add_table(self, name: Name, text: str) -> None:
        if match := PARTITION_KEY.search(text):
            self.partitioned[name] = "RANGE" if match[1] == "RANGE" else "LIST", _columns(match[2])
        for item in list_items(text):
            if check := TABLE_CHECK.match(item):
                self.checks.setdefault(name, []).append(Check(read_name(check[1]), check[2]))

    def _add_domain(self, text: str) -> None:
        if match := DOMAIN.match(text):
            checks = tuple(Check(read_name(one[1]), one[2]) for one in DOMAIN_CHECK.finditer(text, match.end()))
            base = re.split(r" (?:COLLATE|DEFAULT|NOT NULL)\b", match[3])[0].strip()
            self.domains[_names_of(match[1], match[2])] = Domain(base.replace('"', ""), checks)


def read_bound(text: str) -> RangeBound | ListBound | None:
    """Read the bound of a partition; None if it is the default, or has another form."""
    if found := RANGE_BOUND.fullmatch(text):
        low, high = (tuple(_values(side)) for side in found.groups())
        if None not in low and None not in high:
            return RangeBound(tuple(filter(None, low)), tuple(filter(None, high))) if all(low) and all(high) else None
    elif found := LIST_BOUND.fullmatch(text):
        return ListBound(frozenset(_values(found[1])))
    return None


def _values(text: str) -> Iterator[BoundValue]:
    for match in re.finditer(VALUE, text):
        word = match[0]
        if word == "NULL":
            yield None
        else:
            yield word[1:-1].replace("''", "'") if word.startswith("'") else word


def _leading_names(items: str) -> Iterator[str]:
    """Yield the name of the column of each item of an index."""
    at = 0
    while match := re.compile(ITEM).match(items, at):
        name = re.match(QUOTED, match[0])
        assert name is not None
        yield name[0]
        at = match.end() + len(", ")


def _columns(text: str) -> tuple[str, ...]:
    return tuple(read_name(quoted) for quoted in re.findall(QUOTED, text))


def _names_of(schema: str, table: str) -> Name:
    return read_name(schema), read_name(table)
