"""The constraints that built rows have to satisfy, compiled for whole columns of lines.

A row adds *values* to the sets of values that constraints compare: a unique key's set has each value once, and a
foreign key's values are in the set of the columns that it references. A value is identified by two hashes of its text.
So that a difference of texts is one of values, and the reverse, only types are compared whose output is canonical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.bytes_column import BytesColumn, Flags, Ints, runs, xxhash64
from cutline.nodes.groups import Column, Group
from cutline.restore.drill.check_expressions import (
    VALUE,
    CheckColumn,
    Condition,
    NotUnderstoodError,
    family_of,
    read_check,
)
from cutline.restore.drill.row_fields import USUAL, Family, FieldsMissingError, RowFields, compare
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_constraints import (
    LARGEST,
    SMALLEST,
    Attached,
    Check,
    Constraints,
    Domain,
    ForeignKey,
    ListBound,
    RangeBound,
    UniqueKey,
    describe_constraints,
)
from cutline.snapshots.ddl.described_ddl import Description, describe
from cutline.snapshots.ddl.quoted_names import Name
from cutline.snapshots.records.chain import Chain

# Built-in types by oid (pg_type.dat). Values of the first kind that are equal have the same text, and the reverse.
INTEGERS, TEXTS, NUMERIC = frozenset({20, 21, 23}), frozenset({25, 1043}), 1700
CANONICAL = INTEGERS | TEXTS | {16, 17, 19, 26, 1082, 1083, 1114, 1184, 2950}
# Values of these types with the same text are equal; equal values may have other texts.
SAME_IF_TEXT_IS = CANONICAL | {18, 650, 829, 869, 1042, 1560, 1562, NUMERIC, 3802}
MODIFIER_HEADER = 4
# Bits of a signed number of 64 bits.
REFERENCES_MAX = 62
NULL = "NULL"
SHOWN_CHARACTERS = 200


class ValueUse(Struct, frozen=True):
    """The value of a row's fields at `places` in the set (`group`, `number`); set 0 of a group are its keys.

    A value of the set itself has `reference` 0; a foreign key's has the key's bit, and need not be there. Unless
    `counts_nulls`, a row with a NULL in the fields adds nothing.
    """

    group: int
    number: int
    places: tuple[int, ...]
    reference: int = 0
    counts_nulls: bool = False


class RangeTest(Struct, frozen=True):
    """The bound of a RANGE partition as far as its first column tells: from `low`, to before `high`; None: no limit.

    With `includes_high`, a value equal to `high` may be in the partition. NULL is in no such partition.
    """

    what: str
    place: int
    family: Family
    low: str | None = None
    high: str | None = None
    includes_high: bool = False

    def outside(self, fields: RowFields) -> Flags:
        """Return which rows are outside the bound."""
        outside = fields.nulls(self.place).copy()
        rows = np.flatnonzero(~outside)
        values = fields.values(self.place).take(rows)
        if self.low is not None:
            sign, is_decided = compare(values, self.low, self.family)
            outside[rows] |= (sign < 0) & is_decided
        if self.high is not None:
            sign, is_decided = compare(values, self.high, self.family)
            outside[rows] |= (sign > (0 if self.includes_high else -1)) & is_decided
        return outside


class ListTest(Struct, frozen=True):
    """The bound of a LIST partition: `values` are all values that it may contain, and None is NULL."""

    what: str
    place: int
    family: Family
    values: frozenset[str | None]

    def outside(self, fields: RowFields) -> Flags:
        """Return which rows have none of the values."""
        is_null = fields.nulls(self.place)
        rows = np.flatnonzero(~is_null)
        values = fields.values(self.place).take(rows)
        has_none = np.ones(len(rows), np.bool_)
        for value in self.values:
            if value is not None:
                sign, is_decided = compare(values, value, self.family)
                has_none &= (sign != 0) & is_decided
        outside = np.full(len(fields), None not in self.values, np.bool_) & is_null
        outside[rows] = has_none
        return outside


BoundTest: TypeAlias = RangeTest | ListTest


class RowCheck(Struct, frozen=True):
    """A CHECK constraint that a row breaks if the condition is false; `places` are the columns to show."""

    what: str
    condition: Condition
    places: tuple[int, ...]


class TableRules(Struct, frozen=True):
    """The rules for the rows of a table of `columns`. `required` are the places of columns that are NOT NULL."""

    columns: tuple[str, ...]
    uses: tuple[ValueUse, ...] = ()
    bounds: tuple[BoundTest, ...] = ()
    checks: tuple[RowCheck, ...] = ()
    required: tuple[int, ...] = ()

    @property
    def has_rules(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.uses or self.bounds or self.checks or self.required)


class ShardRules(Struct, frozen=True):
    """The rules of a shard's tables, by the numbers of their groups.

    `sets` says whose values a set has, as (table, what), by group and number. `references` are the foreign keys of
    each set, by bit. `evaluated` and `others` count the constraints that are and are not evaluated.
    """

    tables: Mapping[int, TableRules]
    sets: Mapping[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    references: Mapping[tuple[int, int], tuple[ForeignKey, ...]] = field(default_factory=dict)
    evaluated: int = 0
    others: int = 0


class AddedValues(Struct, frozen=True):
    """Values that rows add to a set, in the text form of their fields with a TAB between them."""

    use: ValueUse
    values: BytesColumn


class Breach(Struct, frozen=True):
    """`count` rows of a group that break a constraint by themselves: "rows that …", and the values of such a row."""

    group: int
    what: str
    example: str
    count: int


def compile_rules(chain: Chain, shard: str, ddl: DdlArchive) -> ShardRules:
    """Compile the constraints of a shard's tables at the chain's last commit."""
    return compile_constraints(chain.groups(shard), describe_constraints(ddl), describe(ddl))


def compile_constraints(groups: Sequence[Group], constraints: Constraints, described: Description) -> ShardRules:
    """Compile the constraints of tables, all of which are in one shard."""
    return _Compiling(groups, constraints, described).rules()


class _Compiling:
    """Compiles a shard's constraints."""

    def __init__(self, groups: Sequence[Group], constraints: Constraints, described: Description) -> None:
        self._groups = {(group.schema, group.table): group for group in groups}
        self._constraints, self._described = constraints, described
        self._domains = {f"{schema}.{name}": domain for (schema, name), domain in constraints.domains.items()}
        self._tables = {group.number: TableRules(tuple(one.name for one in group.columns)) for group in groups}
        self._sets: dict[tuple[int, int], tuple[str, str]] = {}
        self._references: dict[tuple[int, int], list[ForeignKey]] = {}
        self._numbers: dict[tuple[Name, tuple[str, ...]], int] = {}
        self._made = 0
        self._evaluated, self._others = 0, constraints.others

    def rules(self) -> ShardRules:
        """Return the rules of all tables."""
        for group in self._groups.values():
            if group.key_width:
                key = ", ".join(column.name for column in group.columns[: group.key_width])
                self._sets[group.number, 0] = group.name, f"the key ({key})"
        for unique in self._constraints.unique:
            self._note(is_evaluated=self._add_unique(unique))
        for reference in self._constraints.references:
            self._note(is_evaluated=self._add_reference(reference))
        for name, group in self._groups.items():
            self._add_bounds(name, group)
            self._add_checks(name, group)
            self._add_required(name, group)
        return ShardRules(
            {number: rules for number, rules in self._tables.items() if rules.has_rules},
            self._sets,
            {of: tuple(keys) for of, keys in self._references.items()},
            self._evaluated,
            self._others,
        )

    def _note(self, *, is_evaluated: bool | None) -> None:
        if is_evaluated is not None:
            self._evaluated += is_evaluated
            self._others += not is_evaluated

    def _add_unique(self, unique: UniqueKey) -> bool | None:
        """Add a unique key; return whether that is possible, None if its table has no rows of its own."""
        group = self._groups.get(unique.table)
        if group is None:
            return None
        if self._is_key(group, unique.columns):
            return True
        columns = self._columns(group, unique.columns)
        if columns is None or not all(self._is_same_if_text_is(column) for column in columns):
            return False
        self._new_set((unique.table, tuple(sorted(unique.columns))), unique.table, f"unique {unique.name}", unique)
        return True

    def _is_key(self, group: Group, columns: Sequence[str]) -> bool:
        key = [column.name for column in group.columns[: group.key_width]]
        return len(key) == len(columns) and set(key) == set(columns)

    def _columns(self, group: Group, names: Sequence[str]) -> tuple[Column, ...] | None:
        by_name = {column.name: column for column in group.columns}
        found = tuple(by_name[name] for name in names if name in by_name)
        return found if len(found) == len(names) else None

    def _is_same_if_text_is(self, column: Column) -> bool:
        return column.type_oid in SAME_IF_TEXT_IS or column.type_oid in self._described.enums

    def _new_set(self, key: tuple[Name, tuple[str, ...]], table: Name, what: str, unique: UniqueKey | None) -> int:
        """Make a set of the values of a table's columns, in the order of their names; return its number."""
        self._made += 1
        number = self._made
        if unique is None or not unique.counts_nulls:
            self._numbers.setdefault(key, number)
        self._sets[0, number] = f"{table[0]}.{table[1]}", f"{what} ({', '.join(key[1])})"
        for leaf in self._constraints.leaves(table):
            group = self._groups[leaf]
            use = ValueUse(0, number, _places(group, key[1]), counts_nulls=bool(unique and unique.counts_nulls))
            self._add_use(group, use)
        return number

    def _add_use(self, group: Group, use: ValueUse) -> None:
        rules = self._tables[group.number]
        self._tables[group.number] = replace(rules, uses=(*rules.uses, use))

    def _add_reference(self, key: ForeignKey) -> bool:
        """Add a foreign key; return whether that is possible."""
        leaves = self._constraints.leaves(key.referenced)
        if any(leaf not in self._groups for leaf in leaves) or len(key.columns) != len(key.referenced_columns):
            return False
        referring = [self._groups[leaf] for leaf in self._constraints.leaves(key.table) if leaf in self._groups]
        for ours in referring:
            for theirs in (self._groups[leaf] for leaf in leaves):
                left, right = self._columns(ours, key.columns), self._columns(theirs, key.referenced_columns)
                if left is None or right is None or not all(map(self._are_comparable, left, right)):
                    return False
        if not referring:
            return True
        of, order = self._set_of(key, leaves)
        keys = self._references.setdefault(of, [])
        if len(keys) == REFERENCES_MAX:
            return False
        keys.append(key)
        places = dict(zip(key.referenced_columns, key.columns, strict=True))
        for ours in referring:
            own = _places(ours, [places[name] for name in order])
            self._add_use(ours, ValueUse(*of, own, reference=1 << (len(keys) - 1)))
        return True

    def _set_of(self, key: ForeignKey, leaves: Sequence[Name]) -> tuple[tuple[int, int], Sequence[str]]:
        """Return the set of the columns that a key references, and the order of the columns in its values."""
        if leaves == (key.referenced,) and self._is_key(self._groups[key.referenced], key.referenced_columns):
            group = self._groups[key.referenced]
            return (group.number, 0), [column.name for column in group.columns[: group.key_width]]
        order = tuple(sorted(key.referenced_columns))
        number = self._numbers.get((key.referenced, order))
        if number is None:
            number = self._new_set((key.referenced, order), key.referenced, "the referenced columns", None)
        return (0, number), order

    def _are_comparable(self, ours: Column, theirs: Column) -> bool:
        """Whether values of both columns are equal if and only if their texts are."""
        both = {ours.type_oid, theirs.type_oid}
        if both <= INTEGERS or (both <= TEXTS and not self._constraints.has_own_collations):
            return True
        if len(both) > 1 or both <= TEXTS:
            return False
        if both == {NUMERIC}:
            return ours.type_modifier == theirs.type_modifier >= MODIFIER_HEADER
        return ours.type_oid in CANONICAL or ours.type_oid in self._described.enums

    def _add_bounds(self, name: Name, group: Group) -> None:
        tests, at, seen = list[BoundTest](), name, set[Name]()
        while at not in seen and (attached := self._constraints.attached.get(at)) is not None:
            seen.add(at)
            test = self._bound_test(at, attached, group)
            tests += [test] if test else []
            self._note(is_evaluated=test is not None)
            at = attached.parent
        if tests:
            self._tables[group.number] = replace(self._tables[group.number], bounds=tuple(tests))

    def _bound_test(self, name: Name, attached: Attached, group: Group) -> BoundTest | None:
        method, columns = self._constraints.partitioned.get(attached.parent, ("", ()))
        column = next((one for one in group.columns if columns and one.name == columns[0]), None)
        family = self._family(column) if column else None
        if column is None or family is None or (family == "text" and self._constraints.has_own_collations):
            return None
        what = f"are outside the bounds of partition {name[0]}.{name[1]} of {attached.parent[0]}.{attached.parent[1]}"
        place, bound = _places(group, [column.name])[0], attached.bound
        if isinstance(bound, RangeBound) and method == "RANGE" and family != "text":
            low = None if bound.low[0] == SMALLEST else bound.low[0]
            high = None if bound.high[0] == LARGEST else bound.high[0]
            if bound.low[0] == LARGEST or bound.high[0] == SMALLEST or not _are_usual([low, high], family):
                return None
            return RangeTest(what, place, family, low, high, includes_high=len(columns) > 1)
        if isinstance(bound, ListBound) and method == "LIST" and _are_usual(bound.values, family):
            return ListTest(what, place, family, bound.values)
        return None

    def _family(self, column: Column) -> Family | None:
        """Return how the values of a column of a built-in type are compared."""
        return family_of(column.type) if column.type_oid in SAME_IF_TEXT_IS else None

    def _add_checks(self, name: Name, group: Group) -> None:
        places = {column.name: place for place, column in enumerate(group.columns)}
        columns = {
            column.name: CheckColumn(
                places[column.name], self._family(column), is_scalar=self._is_scalar(column.type.replace('"', ""))
            )
            for column in group.columns
        }
        found = list[RowCheck]()
        for check in self._constraints.checks.get(name, ()):
            found += self._row_check(check, f"violate CHECK constraint {check.name}", columns)
        for column in group.columns:
            domains, base = self._unfold(column.type.replace('"', ""))
            value = {VALUE: CheckColumn(places[column.name], family_of(base), is_scalar=self._is_scalar(base))}
            for check in (check for domain in domains for check in domain.checks):
                what = f"violate CHECK constraint {check.name} of the domain of column {column.name}"
                found += self._row_check(check, what, value)
        if found:
            self._tables[group.number] = replace(self._tables[group.number], checks=tuple(found))

    def _row_check(self, check: Check, what: str, columns: Mapping[str, CheckColumn]) -> Iterator[RowCheck]:
        try:
            compares_text = not self._constraints.has_own_collations
            condition = read_check(check.expression, columns, compares_text=compares_text)
        except NotUnderstoodError:
            self._note(is_evaluated=False)
            return
        self._note(is_evaluated=True)
        quoted = [name for name in columns if name == VALUE or f'"{name}"' in check.expression]
        yield RowCheck(what, condition, tuple(columns[name].place for name in quoted))

    def _unfold(self, type_: str) -> tuple[list[Domain], str]:
        """Return the domains that a type consists of, from the outermost on, and the type below them."""
        found = list[Domain]()
        while (domain := self._domains.get(type_)) is not None and domain not in found:
            found.append(domain)
            type_ = domain.base
        return found, type_

    def _is_scalar(self, type_: str) -> bool:
        """Whether a type is built-in, an enum, or a domain over these. Names of other types have a schema."""
        base = self._unfold(type_)[1]
        return "." not in base or self._described.types.get(base) in self._described.enums

    def _add_required(self, name: Name, group: Group) -> None:
        table = self._described.tables.get(name)
        required = {column.name for column in table.columns if column.is_not_null} if table else set[str]()
        places = tuple(
            place for place, column in enumerate(group.columns) if place < group.key_width or column.name in required
        )
        self._tables[group.number] = replace(self._tables[group.number], required=places)


def _places(group: Group, names: Sequence[str]) -> tuple[int, ...]:
    places = {column.name: place for place, column in enumerate(group.columns)}
    return tuple(places[name] for name in names)


def _are_usual(values: Sequence[str | None] | frozenset[str | None], family: Family) -> bool:
    return all(value is None or USUAL[family].fullmatch(value) for value in values)


def evaluate(
    rules: Mapping[int, TableRules], groups: npt.NDArray[Any], lines: BytesColumn
) -> Iterator[AddedValues | Breach]:
    """Evaluate the rules of lines, whose groups' numbers are given: yield values for sets, and breaches."""
    chosen = np.flatnonzero(np.isin(groups, list(rules)))
    if len(chosen) and len(chosen) == len(groups) and (groups == groups[0]).all():
        yield from _evaluate(int(groups[0]), rules[int(groups[0])], lines)
        return
    order = chosen[np.argsort(groups[chosen], kind="stable")]
    for run in runs(groups[order]):
        number = int(groups[order[run.start]])
        yield from _evaluate(number, rules[number], lines.take(order[run]))


def _evaluate(number: int, rules: TableRules, lines: BytesColumn) -> Iterator[AddedValues | Breach]:
    required = rules.required if lines_have_nulls(lines) else ()
    if not (rules.uses or rules.bounds or rules.checks or required):
        return
    try:
        fields = RowFields(lines, len(rules.columns))
    except FieldsMissingError as error:
        yield Breach(number, "have another number of fields than the table has columns", "", error.lines)
        return
    for use in rules.uses:
        is_chosen = np.ones(len(fields), np.bool_)
        if not use.counts_nulls:
            for place in use.places:
                is_chosen &= ~fields.nulls(place)
        values = fields.joined(use.places)
        if not is_chosen.all():
            values = values.take(np.flatnonzero(is_chosen))
        yield AddedValues(use, values)
    for test in rules.bounds:
        yield from _breach(number, rules, fields, test.outside(fields), test.what, (test.place,))
    for check in rules.checks:
        wrong = check.condition.evaluate(fields).false
        yield from _breach(number, rules, fields, wrong, check.what, check.places)
    for place in required:
        what = f"have NULL in column {rules.columns[place]}, which is NOT NULL"
        yield from _breach(number, rules, fields, fields.nulls(place), what, ())


def lines_have_nulls(lines: BytesColumn) -> bool:
    r"""Whether any line contains \N, so that a field may be NULL."""
    data = lines.data[int(lines.offsets[0]) : int(lines.offsets[-1])]
    return bool(((data[:-1] == ord("\\")) & (data[1:] == ord("N"))).any())


def hashes_of(values: BytesColumn) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the two hashes that identify values."""
    first = xxhash64(values)
    return first, xxhash64(values, first)


def _breach(
    number: int, rules: TableRules, fields: RowFields, wrong: Flags, what: str, places: tuple[int, ...]
) -> Iterator[Breach]:
    rows: Ints = np.flatnonzero(wrong)
    if len(rows):
        example = "; ".join(f"{rules.columns[place]} is {_shown(fields, place, int(rows[0]))}" for place in places)
        yield Breach(number, what, example, len(rows))


def _shown(fields: RowFields, place: int, row: int) -> str:
    if fields.nulls(place)[row]:
        return NULL
    value = fields.values(place).part(slice(row, row + 1))
    return shown_value(value.data.tobytes())


def shown_value(value: bytes) -> str:
    """Return a value as messages show it."""
    return value.decode(errors="backslashreplace")[:SHOWN_CHARACTERS]
