"""The sources that are objects of base copies.

A fleet's copies may have millions of objects. So object lists stay compressed, as they were read, here and in what is
sent to executors; one is expanded at a time, or of several nodes one each (`interleaved`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import TypeAlias

import numpy as np

from cutline.columns.bytes_column import Ints
from cutline.snapshots.fold.schema_at_cut import SchemaMapping
from cutline.snapshots.fold.sources import BaseSource, Source
from cutline.snapshots.records.commit import LostList, ObjectList, StoredObject, listed_objects

# Of lists that are expanded at a time: 16 of 10,000 objects with rows of one table, which take 100 MB then.
EXPANDED_BYTES_MAX = 48 << 20


@dataclass(frozen=True, slots=True)
class BaseForm:
    """What the base sources of a node have in common; see BaseSource. `mapping` is None if no rows need conversion."""

    node: str
    number: int
    truncated: frozenset[int]
    multisets: frozenset[int]
    mapping: SchemaMapping | None
    chosen: frozenset[int] | None = None

    def source(self, one: StoredObject) -> BaseSource:
        """The source of an object."""
        source = Source(one.key, self.node, self.number, one.size, one.digest, one.rows)
        mapping = self.mapping.restrict_to(one.rows) if self.mapping else None
        return BaseSource(source, one.rows, self.truncated, self.multisets, mapping)

    def groups_of(self, rows: Iterable[int]) -> frozenset[int]:
        """The numbers at the cut of groups, by the numbers under which their rows are stored."""
        if self.mapping is None:
            return frozenset(rows)
        numbers = map(self.mapping.number_of, rows)
        return frozenset(number for number in numbers if number is not None)

    def takes(self, rows: Iterable[int]) -> bool:
        """Whether rows of these groups, by the numbers under which they are stored, are wanted."""
        return self.chosen is None or not self.chosen.isdisjoint(self.groups_of(rows))

    def sources(self, objects: Iterable[StoredObject]) -> tuple[BaseSource, ...]:
        """The sources of those of the objects that have wanted rows."""
        return tuple(self.source(one) for one in objects if self.takes(one.rows))


@dataclass(frozen=True, slots=True)
class ListedBases:
    """The sources that an object list lists: `count` of them have wanted rows."""

    form: BaseForm
    listed: ObjectList
    count: int

    @classmethod
    def of(cls, form: BaseForm, listed: ObjectList) -> ListedBases:
        """The sources of the list."""
        if isinstance(listed, LostList) or not form.takes(listed.rows):
            return cls(form, listed, 0)
        if all(form.takes([number]) for number in listed.rows):
            # All of its objects, which are as many as it says.
            return cls(replace(form, chosen=None), listed, listed.objects)
        return cls(form, listed, sum(form.takes(one.rows) for one in listed_objects(listed)))

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups whose rows they have."""
        return self.form.groups_of(self.listed.rows)

    def read(self) -> tuple[BaseSource, ...]:
        """The sources."""
        return self.form.sources(listed_objects(self.listed))

    @property
    def list_bytes(self) -> int:
        """The size of the list that `read` expands."""
        return self.listed.size

    @property
    def size(self) -> int:
        """The bytes of all objects of the list."""
        return self.listed.bytes

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class HeldBases:
    """Sources that are held as such: few, for their commits list them themselves."""

    held: tuple[BaseSource, ...]

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups whose rows they have."""
        return frozenset[int]().union(*(one.groups for one in self.held))

    def read(self) -> tuple[BaseSource, ...]:
        """The sources."""
        return self.held

    @property
    def list_bytes(self) -> int:
        """The size of the list that `read` expands: there is none."""
        return 0

    @property
    def size(self) -> int:
        """The bytes of the objects."""
        return sum(one.source.size for one in self.held)

    def __len__(self) -> int:
        return len(self.held)


BasePart: TypeAlias = HeldBases | ListedBases


@dataclass(frozen=True, slots=True)
class NodeBases:
    """The base sources of a node, in parts; `number` is the node's in the job."""

    number: int
    parts: tuple[BasePart, ...]

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups whose rows they have."""
        return frozenset[int]().union(*(part.groups for part in self.parts))

    def __iter__(self) -> Iterator[BaseSource]:
        for part in self.parts:
            yield from part.read()


# A cached property needs a dictionary.
@dataclass(frozen=True)
class BaseSources:
    """The base sources of all nodes of a job, numbered from 0 on."""

    nodes: tuple[NodeBases, ...] = ()

    @classmethod
    def of(cls, sources: Iterable[BaseSource]) -> BaseSources:
        """Sources that are held as such, those of a node next to each other."""
        by_node = groupby(sources, lambda one: one.source.number)
        return cls(tuple(NodeBases(number, (HeldBases(tuple(some)),)) for number, some in by_node))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[BaseSource]:
        for part in self._parts:
            yield from part.read()

    def interleaved(self) -> Iterator[BaseSource]:
        """Yield the same sources, from many nodes in turn: from as many as have lists of EXPANDED_BYTES_MAX, or one."""
        waiting = deque((max(part.list_bytes for part in node.parts), iter(node)) for node in self.nodes if node.parts)
        begun, expanded = deque[tuple[int, Iterator[BaseSource]]](), 0
        while begun or waiting:
            while waiting and (not begun or expanded + waiting[0][0] <= EXPANDED_BYTES_MAX):
                begun.append(waiting.popleft())
                expanded += begun[-1][0]
            size, sources = begun.popleft()
            if (found := next(sources, None)) is not None:
                begun.append((size, sources))
                yield found
            else:
                expanded -= size

    def __getitem__(self, number: int) -> BaseSource:
        """The source with this number; who needs several asks a BaseCursor."""
        first, part = self.part_with(number)
        return part[number - first]

    def part_with(self, number: int) -> tuple[int, tuple[BaseSource, ...]]:
        """The part of the sources with this number among them, and the number of its first; raise IndexError."""
        at = bisect_right(self._ends, number)
        return self._ends[at] - len(self._parts[at]), self._parts[at].read()

    def groups_of(self, number: int) -> frozenset[int]:
        """The numbers at the cut of the groups of which the base sources of a node have rows."""
        return frozenset[int]().union(*(one.groups for one in self.nodes if one.number == number))

    def without(self, numbers: Collection[int]) -> BaseSources:
        """The sources of all nodes but these."""
        return BaseSources(tuple(one for one in self.nodes if one.number not in numbers))

    def numbers_with(self, groups: Mapping[int, frozenset[int]]) -> Ints:
        """The numbers of the sources with rows of these groups, by node number."""
        found, first = [np.zeros(0, np.int64)], 0
        for node in self.nodes:
            wanted = groups.get(node.number, frozenset())
            for part in node.parts:
                if not wanted.isdisjoint(part.groups):
                    # If all groups of a part are wanted, its list need not be read.
                    is_whole = wanted.issuperset(part.groups)
                    has_rows = is_whole or [not wanted.isdisjoint(one.groups) for one in part.read()]
                    found.append(first + np.flatnonzero(np.broadcast_to(has_rows, len(part))))
                first += len(part)
        return np.concatenate(found)

    @cached_property
    def _parts(self) -> tuple[BasePart, ...]:
        return tuple(part for node in self.nodes for part in node.parts if len(part))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """For each part the number after its last source."""
        return tuple(accumulate(map(len, self._parts)))


class BaseCursor:
    """Finds sources by their numbers. Fastest in the order of numbers: it keeps the part that it read last."""

    def __init__(self, bases: BaseSources) -> None:
        self._bases = bases
        self._first, self._part = 0, tuple[BaseSource, ...]()

    def source(self, number: int) -> BaseSource:
        """The source with this number; raise IndexError."""
        if not self._first <= number < self._first + len(self._part):
            self._first, self._part = self._bases.part_with(number)
        return self._part[number - self._first]
