"""Find objects that once were the same on all shards, and no longer are.

Shards may have different definitions for good reasons, and a change reaches them one after another. So such a
difference is a doubt, and never a conflict. Objects that never were the same are not noted.

Objects that no shard had were the same, too: an object that is new, but not on all shards, is noted if the shards had
the same tables and the same objects of its kind before, and still have the same tables. So nothing is noted of shards
that have tables of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from msgspec import Struct, field

from cutline.check.report import Doubt, Findings
from cutline.nodes.encodings import raw_bytes
from cutline.nodes.groups import Column, Group, copy_text
from cutline.snapshots.ddl.contradictions import is_constant
from cutline.snapshots.ddl.ddl_archive import SEQUENCE, TABLE
from cutline.snapshots.ddl.described_ddl import COMPARED, OF_OWNER, OWNER, Description
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import point_label

NAMED_MAX = 5
# The built-in types whose constants are compared with stored values, by oid.
BOOL, TEXTS, INTEGERS = 16, frozenset({25, 1043}), frozenset({20, 21, 23})
INTEGER = re.compile(r"(-?[0-9]+)|'(-?[0-9]+)'::[a-z]+")
STRING = re.compile(r"'((?:[^']|'')*)'(?:::(?:\"text\"|character varying))?")
Place = tuple[str, str]
# A kind of objects, and the label of an object (Description.digests).
Label = tuple[str, str]


class AddedColumn(Struct, frozen=True):
    """A column that an increment added: the value of older rows, as copy_text writes it, and the default in the DDL."""

    missing: str
    default: str | None


class ShardDifferences(Struct):
    """The objects that the shards of a chain have in common.

    `_equal` maps the kind and label of an object to the last increment at which it was the same on all shards,
    `_value` to its digest there, and `_since` to the first increment after that; objects in `_new` were on no shard
    then. `_alike` maps the kinds of which all shards had the same objects, and the same tables, when they were last
    compared, to that increment. `_digests` are those of all shards at the last increment with new DDL; None if the
    shards can't be compared there. `_added` are columns by table and name, and by shard.
    """

    _equal: dict[Label, int] = field(default_factory=dict)
    _value: dict[Label, int] = field(default_factory=dict)
    _since: dict[Label, int] = field(default_factory=dict)
    _new: set[Label] = field(default_factory=set)
    _alike: dict[str, int] = field(default_factory=dict)
    _digests: Mapping[str, Mapping[Label, int]] | None = None
    _added: dict[Place, dict[str, AddedColumn]] = field(default_factory=dict)
    _doubts: list[Doubt] = field(default_factory=list)

    def add(self, chain: Chain, before: Chain | None, descriptions: Mapping[str, Description | None]) -> None:
        """Compare the shards at the chain's last commit, which lists new DDL; `before` is the chain before it."""
        increment = chain.last.increment
        known = {shard: described for shard, described in descriptions.items() if described is not None}
        if before is not None:
            for shard, described in known.items():
                if shard in before.parts:
                    self._add_columns(before, chain, shard, described)
        # Versions of pg_dump write the same definition differently.
        if len(known) < max(len(descriptions), 2) or len({described.writer for described in known.values()}) > 1:
            self._digests = None
            return
        before_it = frozenset[Label]().union(*(self._digests or {}).values())
        self._digests = {shard: described.digests for shard, described in known.items()}
        self._compare_kinds(self._digests.values(), increment, before_it)
        first, *others = self._digests.values()
        for name, digest in first.items():
            if all(other.get(name) == digest for other in others):
                self._equal[name], self._value[name] = increment, digest
                self._since.pop(name, None)
                self._new.discard(name)
        for name in [name for name in self._new if all(name in digests for digests in self._digests.values())]:
            # It has reached all shards, as another object on each: it never was the same.
            for of in (self._equal, self._since):
                of.pop(name, None)
            self._new.discard(name)
        for name, last in self._equal.items():
            if last < increment:
                self._since.setdefault(name, increment)

    def begin_again(self) -> None:
        """Forget what all shards had in common: other shards are compared from now on."""
        for known in (self._equal, self._value, self._since, self._new, self._alike):
            known.clear()
        self._digests = None

    def _compare_kinds(self, shards: Collection[Mapping[Label, int]], increment: int, known: Collection[Label]) -> None:
        """Find objects that only some shards have, and that no shard had when all had the same objects of the kind.

        `known` are the objects that any shard had when they were last compared: others on each shard, perhaps.
        """
        objects = [digests.keys() for digests in shards]
        differing = frozenset().union(*objects).difference(frozenset(objects[0]).intersection(*objects[1:]))
        kinds = {kind for kind, _ in differing}
        if TABLE in kinds:
            self._alike = {}
            return
        for name in differing:
            # A commit lists tables and sequences itself, and an owner is new together with its object.
            if (
                name[0] in self._alike
                and not (name in self._equal or name in known)
                and name[0] not in (OWNER, SEQUENCE)
            ):
                self._equal[name] = self._alike[name[0]]
                self._new.add(name)
        self._alike = dict.fromkeys(COMPARED - kinds, increment)

    def _add_columns(self, before: Chain, chain: Chain, shard: str, described: Description) -> None:
        """Compare the older values of columns that this commit adds with the defaults in its DDL."""
        changes = chain.last.definition_changes
        successions = changes.successions.get(shard, {}) if changes else {}
        old = before.definitions(shard)
        for group in changes.groups.get(shard, ()) if changes and successions else ():
            if group.number not in successions:
                continue
            known = {column.number for column in old[successions[group.number]].columns}
            for column in group.columns:
                if column.number not in known and column.missing is not None:
                    self._add_column(group, column, shard, described)

    def _add_column(self, group: Group, column: Column, shard: str, described: Description) -> None:
        default = described.default_of((group.schema, group.table, column.name))
        missing = str(column.missing)
        self._added.setdefault((group.name, column.name), {})[shard] = AddedColumn(missing, default)
        constant = constant_text(default, column) if default is not None else None
        if constant is not None and constant != missing:
            detail = (
                f"older rows have {missing} in added column {column.name}, but its default in the DDL is {default}:"
                " somebody changed the default right after adding the column, or changed the store"
            )
            self._doubts.append(Doubt("older-value", detail, node=shard, group=group.name))

    def note(self, findings: Findings) -> None:
        """Add doubts for everything that was the same once and no longer is."""
        for doubt in (*self._doubts, *self._differing_values()):
            findings.doubt(doubt)
        if self._digests is None:
            return
        found = [
            (name, Counter(digests.get(name) for digests in self._digests.values()))
            for name in sorted(self._since)
            if len({digests.get(name) for digests in self._digests.values()}) > 1
        ]
        lost = {label for (kind, label), values in found if kind != OWNER and None in values}
        found = [
            (name, values)
            for name, values in found
            # The owner of an object is missing together with it.
            if name[0] != OWNER or name[1].removeprefix(OF_OWNER) not in lost
        ]
        for name, values in found[:NAMED_MAX]:
            since, last = self._since[name], self._equal[name]
            if name in self._new:
                here = ", ".join([shard for shard, digests in self._digests.items() if name in digests][:NAMED_MAX])
                detail = f"{name[1]} was on no shard up to {point_label(last)}; since increment {since}, it is only on"
                findings.doubt(Doubt("shards", f"{detail} {here}"))
                continue
            # With two shards, there is no majority.
            was = self._value[name]
            usual = was if was in values else values.most_common(1)[0][0]
            others = [
                f"{'missing from' if digests.get(name) is None else 'different on'} {shard}"
                for shard, digests in self._digests.items()
                if digests.get(name) != usual
            ]
            detail = f"{name[1]} was the same on all shards up to {point_label(last)}; since increment {since}, it is"
            findings.doubt(Doubt("shards", f"{detail} {', '.join(others[:NAMED_MAX])}"))
        if len(found) > NAMED_MAX:
            more = len(found) - NAMED_MAX
            findings.doubt(Doubt("shards", f"{more} more objects were the same on all shards, and no longer are"))

    def _differing_values(self) -> Iterator[Doubt]:
        for (table, column), shards in self._added.items():
            defaults = {added.default for added in shards.values()}
            values = {added.missing for added in shards.values()}
            (default, *more) = defaults
            if more or default is None or not is_constant(default) or len(values) < 2:
                continue
            shown = ", ".join(f"{added.missing} on {shard}" for shard, added in list(shards.items())[:NAMED_MAX])
            detail = f"older rows have different values in added column {column}, whose default is {default}: {shown}"
            yield Doubt("older-value", detail, group=table)


def constant_text(default: str, column: Column) -> str | None:
    """Return the value of a default as copy_text writes it; None if it is not a constant of a type compared here."""
    if column.type_oid in INTEGERS and (integer := INTEGER.fullmatch(default)):
        return integer[1] or integer[2]
    if column.type_oid == BOOL and default in ("true", "false"):
        return default[0]
    if column.type_oid in TEXTS and (text := STRING.fullmatch(default)):
        return copy_text(raw_bytes(text[1].replace("''", "'")))
    return None
