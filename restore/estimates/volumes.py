"""The volume of what is restored, by shard: counts and sizes that the commits list. Nothing is read for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cutline.fleet.tables.groups import Group
from cutline.snapshots.ddl.archive import FOREIGN_KEY, ArchiveEntry
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.stored_object import LARGE_OBJECTS, NamedObject, ObjectList, listed_objects

# A database takes at least this: its catalogs.
EMPTY_BYTES = 8 << 20
# How much more room rows and indexes take than the compressed base copy. Only for commits that don't say the size.
EXPANSION = 8
INDEXES = ("INDEX", "CONSTRAINT", FOREIGN_KEY)
WITH_ROWS = ("TABLE", "MATERIALIZED VIEW")


@dataclass(frozen=True, slots=True)
class ShardVolume:
    """What is restored of a shard.

    `rows` are those of the base copies, by table; `changes` of the increments are folded into them. `base_bytes`,
    `large_bytes`, `segment_bytes` and `stored_bytes` are as stored, the last one of all. `size_bytes` is what the
    database takes, rough if `is_rough`. `indexes` are its indexes, keys and foreign keys, by table. Where routes divide
    tables, the numbers of rows and changes are rough. `loaded` rows were loaded by an earlier process.
    """

    rows: Mapping[str, int]
    changes: int
    base_bytes: int
    large_bytes: int
    segment_bytes: int
    stored_bytes: int
    size_bytes: int
    is_rough: bool
    tables: int
    indexes: Mapping[str, int]
    rows_are_rough: bool = False
    changes_are_rough: bool = False
    loaded: int = 0

    @property
    def row_count(self) -> int:
        """All rows of the base copies."""
        return sum(self.rows.values())

    @property
    def index_work(self) -> int:
        """How many comparisons sort all indexes, in those that a row takes in an index of a million.

        An index of an empty table counts as one.
        """
        million = math.log2(1e6)
        sorts = ((count, 1 + self.rows.get(table, 0)) for table, count in self.indexes.items())
        return sum(count * max(round(rows * math.log2(rows) / million), 1) for count, rows in sorts)


@dataclass(frozen=True, slots=True)
class BegunShard:
    """What earlier processes have done of a shard: they have loaded `rows`, all of them if `is_loaded`.

    `phase` is that of its database (restore/targets/database_records.py).
    """

    phase: str
    rows: int
    is_loaded: bool

    def volume_left(self, volume: ShardVolume) -> ShardVolume:
        """The shard's volume with what is done already: its tables, and some of its rows or all."""
        if not self.is_loaded:
            return replace(volume, loaded=min(self.rows, volume.row_count), tables=0 if self.rows else volume.tables)
        return replace(volume, loaded=volume.row_count, changes=0, large_bytes=0, tables=0)


def measure_volume(chain: Chain, shard: str, groups: Iterable[Group], entries: Iterable[ArchiveEntry]) -> ShardVolume:
    """The volume of a shard's `groups`; `entries` are those of its DDL that are restored."""
    chosen = tuple(groups)
    names = stored_names(chain, shard, chosen)
    base_bytes, rows = 0, Counter[str]()
    for one in base_entries(chain, shard, names.keys()):
        base_bytes += size_of(one)
        for number, count in one.rows.items():
            if number in names:
                rows[names[number]] += count
    large_bytes = sum(size_of(one) for one in chain.full.entries if (one.kind, one.node) == (LARGE_OBJECTS, shard))
    segments = chain.segments(shard)
    segment_bytes = sum(one.size for one in segments)
    facts = chain.database_facts(shard)
    size, is_rough = EMPTY_BYTES + EXPANSION * (base_bytes + large_bytes), True
    if facts:
        all_rows = sum(chain.base_rows(shard).values())
        is_rough = len(chosen) < len(chain.groups(shard))
        size = int(facts.size_bytes * rows.total() / max(all_rows, 1)) if is_rough else facts.size_bytes
    return ShardVolume(
        rows,
        sum(one.changes for one in segments),
        base_bytes,
        large_bytes,
        segment_bytes,
        base_bytes + large_bytes + segment_bytes + (ddl.size if (ddl := chain.ddl_object(shard)) else 0),
        max(size, EMPTY_BYTES),
        is_rough,
        len(chosen),
        count_indexes(entries),
    )


def without_rows(volume: ShardVolume) -> ShardVolume:
    """The volume of a restore of the DDL alone."""
    ddl_bytes = volume.stored_bytes - volume.base_bytes - volume.large_bytes - volume.segment_bytes
    return replace(
        volume, rows={}, changes=0, base_bytes=0, large_bytes=0, segment_bytes=0,
        stored_bytes=ddl_bytes, size_bytes=EMPTY_BYTES, is_rough=True,
    )  # fmt: skip


def without_large_objects(volume: ShardVolume) -> ShardVolume:
    """The volume of a restore of some tables."""
    return replace(volume, large_bytes=0, stored_bytes=volume.stored_bytes - volume.large_bytes)


def combine_volumes(volumes: Sequence[ShardVolume], shares: Sequence[Mapping[str, float]]) -> ShardVolume:
    """What a target gets of several shards with the same tables: of each table the share of its rows, by shard.

    A share between 0 and 1 is a guess. Commits count changes by shard, not by table: these are divided as the rows are.
    """
    rows: Counter[str] = Counter()
    parts: list[float] = []
    for one, share in zip(volumes, shares, strict=True):
        taken = {table: round(count * share[table]) for table, count in one.rows.items()}
        rows.update(taken)
        parts.append(sum(taken.values()) / one.row_count if one.row_count else sum(share.values()) / len(share))

    def total(count: Callable[[ShardVolume], int]) -> int:
        return sum(round(count(one) * part) for one, part in zip(volumes, parts, strict=True))

    each = list(zip(volumes, shares, strict=True))
    return ShardVolume(
        rows,
        total(lambda one: one.changes),
        total(lambda one: one.base_bytes),
        total(lambda one: one.large_bytes),
        total(lambda one: one.segment_bytes),
        total(lambda one: one.stored_bytes),
        max(total(lambda one: one.size_bytes), EMPTY_BYTES),
        is_rough=True,
        tables=volumes[0].tables,
        indexes=volumes[0].indexes,
        rows_are_rough=any(0 < share[table] < 1 for one, share in each for table in one.rows),
        changes_are_rough=any(one.changes and set(share.values()) not in ({0.0}, {1.0}) for one, share in each),
    )


def stored_names(chain: Chain, shard: str, groups: Iterable[Group]) -> dict[int, str]:
    """The groups' names, by every number under which their rows may be stored."""
    names = {group.number: group.name for group in groups}
    for new, old in sorted(chain.successions(shard).items(), reverse=True):
        if new in names:
            names[old] = names[new]
    return names


def base_entries(chain: Chain, shard: str, numbers: Iterable[int]) -> Iterator[NamedObject]:
    """The entries of the shard's base objects that have rows of these groups, by number.

    What a list lists is looked at only if some of its objects may have none.
    """
    wanted = set(numbers)
    for entry in chain.base_entries(shard):
        if wanted.isdisjoint(entry.rows):
            continue
        if wanted.issuperset(entry.rows):
            yield entry
        else:
            yield from (one for one in listed_objects(entry) if not wanted.isdisjoint(one.rows))


def size_of(entry: NamedObject) -> int:
    """The bytes of the object, or of those that a list lists."""
    return entry.bytes if isinstance(entry, ObjectList) else entry.size


def count_indexes(entries: Iterable[ArchiveEntry]) -> dict[str, int]:
    """How many indexes, keys and foreign keys every table has; an entry depends on its table."""
    entries = list(entries)
    tables = {one.number: f"{one.schema}.{one.name}" for one in entries if one.kind in WITH_ROWS}
    owners = (
        next((tables[number] for number in one.dependencies if number in tables), "")
        for one in entries
        if one.kind in INDEXES
    )
    return dict(Counter(owners))
