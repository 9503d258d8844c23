"""The definitions of tables in arrays, for the checks of stored rows.

A fleet may have thousands of tables with hundreds of columns. Executors get a few bytes for each column, and rows of
many tables are checked together: properties of a row's table are looked up by array, not table by table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.own_types import CompositeType, DomainType, EnumType, OwnType, OwnTypes
from cutline.check.value_forms import NAMES, NUMERIC, precision_of
from cutline.columns.bytes_column import Flags, Ints, offsets_of
from cutline.nodes.encodings import UTF8
from cutline.nodes.groups import Group
from cutline.snapshots.records.chain import Chain

# The built-in types whose values are checked, by oid (PostgreSQL's pg_type.dat).
BOOL, INT8, INT2, INT4, OID, UUID = 16, 20, 21, 23, 26, 2950
BPCHAR, VARCHAR, DATE, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1114, 1184
TIMES, TEXTS = frozenset({DATE, TIMESTAMP, TIMESTAMPTZ}), frozenset({BPCHAR, VARCHAR})
LIMITED = TEXTS | {NUMERIC}
# Types of a fixed size whose values have the same text only if they are equal.
EXACT = frozenset({BOOL, INT8, INT2, INT4, OID, UUID, DATE, TIMESTAMP, TIMESTAMPTZ})
# Domains have oids of their own, so these are the only names of the types.
TYPE_NAMES: Mapping[int, str] = {
    BOOL: "boolean", INT8: "bigint", INT2: "smallint", INT4: "integer", OID: "oid", UUID: "uuid",
    BPCHAR: "character({limit})", VARCHAR: "character varying({limit})", **NAMES,
}  # fmt: skip
# The modifier of char(n) and varchar(n) is n + 4, and that of numeric(p, s) contains both after these 4; without a
# limit it is -1.
MODIFIER_HEADER = 4
# The name of a table and the names of its columns; no identifier contains NUL.
NAME_END = "\0"

# The columns of a type: four bytes for each number.
Numbers: TypeAlias = npt.NDArray[np.int32]
LIMIT_MAX = (1 << 31) - 1


class TypedColumns(Struct, frozen=True):
    """All columns of one type: those of form i are `offsets[i]` to `offsets[i + 1]`.

    `places` are the columns' fields in a line. `limits` are the numbers of characters of char and varchar, and the
    modifiers of numeric less their header, -1 without one; empty for other types.
    """

    offsets: Numbers
    places: Numbers
    limits: Numbers

    def of_forms(self, forms: Ints) -> Ints:
        """Return the indexes of the columns of each of these forms in turn."""
        return ranges(self.offsets[forms].astype(np.int64), self.counts(forms))

    def counts(self, forms: Ints) -> Ints:
        """Return the number of columns of each of these forms."""
        return (self.offsets[forms + 1] - self.offsets[forms]).astype(np.int64)

    def take(self, forms: Ints) -> TypedColumns:
        """Return the columns of these forms, in this order."""
        columns = self.of_forms(forms)
        limits = self.limits[columns] if len(self.limits) else self.limits
        return TypedColumns(offsets_of(self.counts(forms)).astype(np.int32), self.places[columns], limits)

    def keep(self, chosen: Flags) -> TypedColumns:
        """Return the chosen columns of all forms."""
        before = np.concatenate([[0], np.cumsum(chosen)]).astype(np.int32)
        limits = self.limits[chosen] if len(self.limits) else self.limits
        return TypedColumns(before[self.offsets], self.places[chosen], limits)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenate the ranges of `counts[i]` numbers from `starts[i]` on."""
    ends = np.cumsum(counts)
    found: Ints = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return found


class TableForms(Struct, frozen=True, dict=True):
    """The forms of definitions: item i of each array belongs to definition `numbers[i]`. The numbers are ascending.

    `widths` and `key_widths` are numbers of columns, `masks` the numbers of partitions less one. `types` has the
    columns whose values are checked, keyed by the oid of their type. `names` has the names of each table and its
    columns, joined by NAME_END. `own` are the names and definitions of types that users have created, keyed by oid.
    If `is_utf8`, all text is in UTF-8.
    """

    numbers: Ints
    widths: Ints
    key_widths: Ints
    masks: Ints
    types: Mapping[int, TypedColumns] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    own: Mapping[int, tuple[str, OwnType]] = field(default_factory=dict)
    is_utf8: bool = False

    @classmethod
    def of(cls, groups: Iterable[Group], own: OwnTypes | None = None) -> TableForms:
        """Return the forms of definitions with different numbers; `own` are the own types of columns."""
        ordered = sorted(groups, key=lambda group: group.number)
        widths = np.array([len(group.columns) for group in ordered], np.int64)
        columns = [column for group in ordered for column in group.columns]
        oids = np.array([column.type_oid for column in columns], np.int64)
        modifiers = np.array([column.type_modifier for column in columns], np.int64)
        places = ranges(np.zeros_like(widths), widths)
        form = np.repeat(np.arange(len(ordered)), widths)
        types: dict[int, TypedColumns] = {}
        for oid in TYPE_NAMES:
            found = np.flatnonzero((oids == oid) & (modifiers >= MODIFIER_HEADER) if oid in TEXTS else oids == oid)
            if len(found):
                limits = np.maximum(modifiers[found] - MODIFIER_HEADER, -1) if oid in LIMITED else modifiers[:0]
                types[oid] = TypedColumns(
                    offsets_of(np.bincount(form[found], minlength=len(ordered))).astype(np.int32),
                    places[found].astype(np.int32),
                    np.minimum(limits, LIMIT_MAX).astype(np.int32),
                )
        of_own, named = _columns_of_own_types(ordered, own or {})
        return cls(
            np.array([group.number for group in ordered], np.int64),
            widths,
            np.array([group.key_width for group in ordered], np.int64),
            np.array([group.partitions - 1 for group in ordered], np.int64),
            types | of_own,
            tuple(NAME_END.join([group.name, *(column.name for column in group.columns)]) for group in ordered),
            named,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def has(self, numbers: Ints) -> Flags:
        """Whether there is a form for each of these numbers of definitions."""
        if not len(self):
            return np.zeros(len(numbers), np.bool_)
        found: Flags = self.numbers[np.minimum(self.find(numbers), len(self) - 1)] == numbers
        return found

    def find(self, numbers: Ints) -> Ints:
        """Return the places of definitions' numbers in the arrays, which are meaningless for those that it lacks."""
        return np.searchsorted(self.numbers, numbers).astype(np.int64)

    def find_other(self, groups: Iterable[Group]) -> Group | None:
        """Return a definition whose number has another form here; what only the DDL tells does not count."""
        known = [group for group in groups if self.has(np.array([group.number]))[0]]
        if not known:
            return None
        forms = TableForms.of(known)
        for group in known:
            ours, theirs = (one.find(np.array([group.number]))[0] for one in (self, forms))
            if self._definition(int(ours)) != forms._definition(int(theirs)):
                return group
        return None

    def _definition(self, form: int) -> tuple[object, ...]:
        """Return everything in a form that commits and segments tell."""
        chosen = np.array([form])
        columns = {oid: columns.take(chosen) for oid, columns in self.types.items() if oid in TYPE_NAMES}
        typed = {oid: (one.places.tolist(), one.limits.tolist()) for oid, one in columns.items() if len(one.places)}
        return self.names[form], int(self.widths[form]), int(self.key_widths[form]), int(self.masks[form]), typed

    def adding(self, groups: Iterable[Group]) -> TableForms:
        """Return these forms, and those of the definitions whose numbers they lack."""
        lacking = [group for group in groups if not self.has(np.array([group.number]))[0]]
        if not lacking:
            return self
        others = TableForms.of(lacking)
        empty = TypedColumns(np.zeros(1, np.int32), np.empty(0, np.int32), np.empty(0, np.int32))
        types: dict[int, TypedColumns] = {}
        for oid in sorted(self.types.keys() | others.types.keys()):
            ours, theirs = (forms.types.get(oid, empty) for forms in (self, others))
            counts = np.concatenate([_counts(ours, len(self)), _counts(theirs, len(others))])
            types[oid] = TypedColumns(
                offsets_of(counts).astype(np.int32),
                np.concatenate([ours.places, theirs.places]),
                np.concatenate([ours.limits, theirs.limits]),
            )
        joined = TableForms(
            np.concatenate([self.numbers, others.numbers]),
            np.concatenate([self.widths, others.widths]),
            np.concatenate([self.key_widths, others.key_widths]),
            np.concatenate([self.masks, others.masks]),
            types,
            (*self.names, *others.names),
            self.own,
            self.is_utf8,
        )
        return joined._take(np.argsort(joined.numbers, kind="stable"))

    def _take(self, forms: Ints) -> TableForms:
        return TableForms(
            self.numbers[forms],
            self.widths[forms],
            self.key_widths[forms],
            self.masks[forms],
            {oid: columns.take(forms) for oid, columns in self.types.items()},
            tuple(self.names[form] for form in forms.tolist()),
            self.own,
            self.is_utf8,
        )

    @cached_property
    def keys(self) -> TableForms:
        """The forms of the keys alone, as lines."""
        types: dict[int, TypedColumns] = {}
        for oid, columns in self.types.items():
            widths = np.repeat(self.key_widths, columns.counts(np.arange(len(self))))
            types[oid] = columns.keep(columns.places < widths)
        widths = self.key_widths
        return TableForms(self.numbers, widths, widths, self.masks, types, self.names, self.own, self.is_utf8)

    @cached_property
    def deletes_old_keys(self) -> Flags:
        """Whether the new row of an UPDATE that has the number of a second change always has a first, the DELETE.

        In a table without a key, every UPDATE has both. In other tables, the WAL has the old key if the key was
        changed, or if a value of it was stored outside of the row (heapam.c, ExtractReplicaIdentity). Then there is no
        DELETE if the keys have the same text. Neither is possible for values of the EXACT types.
        """
        exact = np.zeros(len(self), np.int64)
        for oid in EXACT & self.types.keys():
            exact += self.keys.types[oid].counts(np.arange(len(self)))
        found: Flags = exact == self.key_widths
        return found

    def table(self, form: int) -> str:
        """Return the name of a table."""
        return self.names[form].split(NAME_END, 1)[0]

    def column(self, form: int, place: int) -> str:
        """Return the name of a table's column."""
        return self.names[form].split(NAME_END)[place + 1]

    def definition_of(self, oid: int) -> OwnType | None:
        """Return the definition of a type that a user has created; None for a built-in type."""
        return self.own[oid][1] if oid in self.own else None

    def base_of(self, oid: int) -> int:
        """Return the oid of the built-in type that decides how values of a type look: that of a domain's base."""
        own = self.definition_of(oid)
        return own.base if isinstance(own, DomainType) else oid

    def type_name(self, oid: int, limit: int | None) -> str:
        """Return the name of a type; `limit` is that of its column, or None."""
        if oid in self.own:
            return self.own[oid][0]
        if oid == NUMERIC and limit is not None and (known := precision_of(limit)) is not None:
            return f"numeric({known[0]},{known[1]})"
        return TYPE_NAMES[oid].format(limit=limit)

    @property
    def digest(self) -> bytes:
        """A digest of everything in the forms."""
        own = [(oid, name, _described(type_)) for oid, (name, type_) in sorted(self.own.items())]
        found = hashlib.sha256(repr((self.names, list(self.types), own, self.is_utf8)).encode())
        arrays: list[npt.NDArray[Any]] = [self.numbers, self.widths, self.key_widths, self.masks]
        for columns in self.types.values():
            arrays += [columns.offsets, columns.places, columns.limits]
        for array in arrays:
            found.update(array.tobytes())
        return found.digest()


def _described(own: OwnType) -> object:
    """Return the same text for equal types in every process."""
    if isinstance(own, EnumType):
        return sorted(own.labels)
    return sorted(own.versions) if isinstance(own, CompositeType) else own


def _counts(columns: TypedColumns, forms: int) -> Ints:
    return columns.counts(np.arange(forms)) if len(columns.offsets) > 1 else np.zeros(forms, np.int64)


def _columns_of_own_types(
    ordered: Sequence[Group], given: OwnTypes
) -> tuple[dict[int, TypedColumns], dict[int, tuple[str, OwnType]]]:
    """Return the columns in `given` of all definitions, and their types with their names, both by oid of the type.

    Leaves out domains over types whose values are not checked.
    """
    forms, places = dict[int, list[int]](), dict[int, list[int]]()
    named = dict[int, tuple[str, OwnType]]()
    for form, group in enumerate(ordered):
        for place, own in sorted(given.get(group.number, {}).items()):
            if isinstance(own, DomainType) and not _is_checked(own):
                continue
            column = group.columns[place]
            forms.setdefault(column.type_oid, []).append(form)
            places.setdefault(column.type_oid, []).append(place)
            named[column.type_oid] = column.type, own
    counts = {oid: np.bincount(found, minlength=len(ordered)) for oid, found in forms.items()}
    columns = {
        oid: TypedColumns(
            offsets_of(counts[oid]).astype(np.int32), np.array(found, np.int32), _limits(named[oid][1], len(found))
        )
        for oid, found in places.items()
    }
    return columns, named


def _is_checked(domain: DomainType) -> bool:
    return domain.base in TYPE_NAMES and (domain.base not in TEXTS or domain.modifier >= MODIFIER_HEADER)


def _limits(own: OwnType, columns: int) -> Numbers:
    """Return the limits of so many columns of a type; none if its values have none."""
    if not isinstance(own, DomainType) or own.base not in LIMITED:
        return np.empty(0, np.int32)
    return np.full(columns, min(max(own.modifier - MODIFIER_HEADER, -1), LIMIT_MAX), np.int32)


Sent = TypeVar("Sent")


def forms_of_shards(
    chain: Chain, shards: Iterable[str], own: Mapping[str, OwnTypes], send: Callable[[TableForms], Sent]
) -> dict[str, Sent]:
    """Return what `send` returns for the forms of all definitions of each shard, keyed by shard.

    `own` are the own types of columns, by shard. Shards with the same tables, types and encodings share one result.
    """
    sent: dict[bytes, Sent] = {}
    found: dict[str, Sent] = {}
    encodings = {identity.node: identity.encoding for identity in chain.nodes}
    for shard in sorted(shards):
        forms = TableForms.of(chain.definitions(shard).values(), own.get(shard))
        forms = replace(forms, is_utf8=encodings.get(shard) == UTF8)
        digest = forms.digest
        if digest not in sent:
            sent[digest] = send(forms)
        found[shard] = sent[digest]
    return found
