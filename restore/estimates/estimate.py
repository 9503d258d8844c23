"""Estimate the duration of a restore, by step, from its volume and the figures from an earlier restore.

A step takes a fixed time plus a time proportional to its amount of work. The constants were measured with Spark and all
servers on two cores. Figures recorded by an earlier restore, into any fleet, scale the constants.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import islice

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.nodes.groups import Group
from cutline.snapshots.ddl.ddl_archive import FOREIGN_KEY, ArchiveEntry
from cutline.snapshots.fold.amounts import PAGE_BYTES_PER_STORED_BYTE
from cutline.snapshots.fold.limits import CHANGES_MAX
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import LARGE_OBJECTS, NamedObject, ObjectList, listed_objects
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import RestoreFigures, StepFigures, read_outcome
from cutline.storage.store import ObjectStore

READ_MAX = 50
# Consider only this many of the newest restores, because servers and machines change; choose the one closest in size.
COMPARED_MAX = 5


def read_measured(store: ObjectStore, decided: Iterable[str], rows: int) -> tuple[str, RestoreFigures] | None:
    """Return the operation and figures of the recent restore whose size is closest to `rows`, or None.

    Ties go to the newest. Only the READ_MAX newest decided restores are read.
    """
    recent = list(islice(_newest_figures(store, decided), COMPARED_MAX))
    return min(recent, key=lambda one: abs(math.log((one[1].rows + 1) / (rows + 1))), default=None)


def _newest_figures(store: ObjectStore, decided: Iterable[str]) -> Iterator[tuple[str, RestoreFigures]]:
    # Only restores store a decision, and only successful restores store an outcome with figures.
    for operation in islice(decided, READ_MAX):
        try:
            outcome = read_outcome(store, operation)
        except ManifestError:
            # Skip the outcome: a command that needs it will report the error.
            continue
        if outcome is not None and isinstance(outcome.figures, RestoreFigures):
            yield operation, outcome.figures


# The size of an empty database, which consists of its catalogs.
EMPTY_BYTES = 8 << 20
# Used if a commit does not contain the database's size: the size of rows and indexes as a multiple of the base copy's.
EXPANSION = 8
INDEXES = ("INDEX", "CONSTRAINT", FOREIGN_KEY)
WITH_ROWS = ("TABLE", "MATERIALIZED VIEW")


class ShardVolume(Struct, frozen=True):
    """The amounts to restore for a shard.

    `rows` are the row counts of the base copies, by table; `changes` are the increments' changes to fold into them.
    `base_bytes`, `large_bytes` and `segment_bytes` are stored sizes, and `stored_bytes` is the total. `size_bytes` is
    the size of the database, approximate if `is_rough`. `indexes` counts indexes, keys and foreign keys, by table. If
    routes divide tables, the numbers of rows and changes are approximate. `loaded` is the number of rows that an
    earlier process loaded.
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
        """The total number of rows in the base copies."""
        return sum(self.rows.values())

    @property
    def index_work(self) -> int:
        """The comparisons needed to sort all indexes; the unit is the number per row when sorting a million rows.

        An index on an empty table counts as one.
        """
        million = math.log2(1e6)
        sorts = ((count, 1 + self.rows.get(table, 0)) for table, count in self.indexes.items())
        return sum(count * max(round(rows * math.log2(rows) / million), 1) for count, rows in sorts)


class BegunShard(Struct, frozen=True):
    """What earlier processes did for a shard: they loaded `rows` rows (all of them if `is_loaded`).

    `phase` is the phase of its database (restore/targets/databases.py).
    """

    phase: str
    rows: int
    is_loaded: bool

    def volume_left(self, volume: ShardVolume) -> ShardVolume:
        """Return the shard's volume minus the finished work: its tables, and some or all of its rows."""
        if not self.is_loaded:
            return replace(volume, loaded=min(self.rows, volume.row_count), tables=0 if self.rows else volume.tables)
        return replace(volume, loaded=volume.row_count, changes=0, large_bytes=0, tables=0)


def measure_volume(chain: Chain, shard: str, groups: Iterable[Group], entries: Iterable[ArchiveEntry]) -> ShardVolume:
    """Measure the volume of a shard's `groups`; `entries` are the entries in its DDL that are restored."""
    chosen = tuple(groups)
    names = stored_names(chain, shard, chosen)
    base_bytes, rows = 0, Counter[str]()
    for base_entry in base_entries(chain, shard, names.keys()):
        base_bytes += size_of(base_entry)
        for number, count in base_entry.rows.items():
            if number in names:
                rows[names[number]] += count
    large_bytes = sum(
        size_of(entry) for entry in chain.full.entries if (entry.kind, entry.node) == (LARGE_OBJECTS, shard)
    )
    segments = chain.segments(shard)
    segment_bytes = sum(segment.size for segment in segments)
    facts = chain.database_facts(shard)
    size, is_rough = EMPTY_BYTES + EXPANSION * (base_bytes + large_bytes), True
    if facts:
        all_rows = sum(chain.base_rows(shard).values())
        is_rough = len(chosen) < len(chain.groups(shard))
        size = int(facts.size_bytes * rows.total() / max(all_rows, 1)) if is_rough else facts.size_bytes
    return ShardVolume(
        rows,
        sum(segment.changes for segment in segments),
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
    """Return the volume of a DDL-only restore."""
    ddl_bytes = volume.stored_bytes - volume.base_bytes - volume.large_bytes - volume.segment_bytes
    return replace(
        volume,
        rows={},
        changes=0,
        base_bytes=0,
        large_bytes=0,
        segment_bytes=0,
        stored_bytes=ddl_bytes,
        size_bytes=EMPTY_BYTES,
        is_rough=True,
    )


def without_large_objects(volume: ShardVolume) -> ShardVolume:
    """Return the volume of a restore of some tables."""
    return replace(volume, large_bytes=0, stored_bytes=volume.stored_bytes - volume.large_bytes)


def combine_volumes(volumes: Sequence[ShardVolume], shares: Sequence[Mapping[str, float]]) -> ShardVolume:
    """Return a target's volume from the volumes of several shards; `shares` are its shares of each table's rows.

    A share between 0 and 1 is a guess. Commits count changes per shard, not per table, so changes are divided in
    proportion to the rows.
    """
    rows: Counter[str] = Counter()
    parts: list[float] = []
    for one, share in zip(volumes, shares, strict=True):
        taken = {table: round(count * share[table]) for table, count in one.rows.items()}
        rows.update(taken)
        parts.append(sum(taken.values()) / one.row_count if one.row_count else sum(share.values()) / len(share))

    def total(count: Callable[[ShardVolume], int]) -> int:
        return sum(round(count(volume) * part) for volume, part in zip(volumes, parts, strict=True))

    each = list(zip(volumes, shares, strict=True))
    return ShardVolume(
        rows,
        total(lambda volume: volume.changes),
        total(lambda volume: volume.base_bytes),
        total(lambda volume: volume.large_bytes),
        total(lambda volume: volume.segment_bytes),
        total(lambda volume: volume.stored_bytes),
        max(total(lambda volume: volume.size_bytes), EMPTY_BYTES),
        is_rough=True,
        tables=volumes[0].tables,
        indexes=volumes[0].indexes,
        rows_are_rough=any(0 < share[table] < 1 for volume, share in each for table in volume.rows),
        changes_are_rough=any(volume.changes and set(share.values()) not in ({0.0}, {1.0}) for volume, share in each),
    )


def stored_names(chain: Chain, shard: str, groups: Iterable[Group]) -> dict[int, str]:
    """Return the groups' names, keyed by every number under which their rows may be stored."""
    names = {group.number: group.name for group in groups}
    for new, old in sorted(chain.successions(shard).items(), reverse=True):
        if new in names:
            names[old] = names[new]
    return names


def base_entries(chain: Chain, shard: str, numbers: Iterable[int]) -> Iterator[NamedObject]:
    """Yield the entries for the shard's base objects that contain rows of the groups with these numbers.

    An object list is expanded only if some of its objects may contain none of those rows.
    """
    wanted = set(numbers)
    for entry in chain.base_entries(shard):
        if wanted.isdisjoint(entry.rows):
            continue
        if wanted.issuperset(entry.rows):
            yield entry
        else:
            yield from (
                listed_object for listed_object in listed_objects(entry) if not wanted.isdisjoint(listed_object.rows)
            )


def size_of(entry: NamedObject) -> int:
    """Return the size of the object, or the total size of all objects in an object list."""
    return entry.bytes if isinstance(entry, ObjectList) else entry.size


def count_indexes(entries: Iterable[ArchiveEntry]) -> dict[str, int]:
    """Count every table's indexes, keys and foreign keys: those whose entries depend on the table's entry."""
    entries = list(entries)
    tables = {entry.number: f"{entry.schema}.{entry.name}" for entry in entries if entry.kind in WITH_ROWS}
    owners = (
        next((tables[number] for number in entry.dependencies if number in tables), "")
        for entry in entries
        if entry.kind in INDEXES
    )
    return dict(Counter(owners))


class RestoreStep(StrEnum):
    """The steps of a restore, in order, with their names in progress reports."""

    DATABASES = "create databases"
    SPARK = "start Spark"
    FOLD = "fold changes"
    ROWS = "load rows"
    LARGE_OBJECTS = "load large objects"
    INDEXES = "indexes and constraints"
    SWAP = "swap databases"


class StepCost(Struct, frozen=True):
    """The cost of a step in seconds: a fixed time, and a time per unit of work."""

    fixed: float
    per_unit: float = 0.0

    def seconds(self, amount: int) -> float:
        """Return the seconds that a step with this amount of work takes."""
        return self.fixed + self.per_unit * amount

    def scaled(self, measured: StepFigures) -> StepCost:
        """Return the cost that matches the measured figures; components too small to measure hardly change."""
        expected = self.seconds(measured.amount)
        factor = measured.seconds / expected if expected else 1.0
        share = self.per_unit * measured.amount / expected if expected else 0.0
        return StepCost(self.fixed * (share + (1 - share) * factor), self.per_unit * (1 - share + share * factor))


COSTS: Mapping[RestoreStep, StepCost] = {
    RestoreStep.DATABASES: StepCost(0.25, 0.004),
    RestoreStep.SPARK: StepCost(3.0),
    RestoreStep.FOLD: StepCost(0.03, 1.2e-6),
    RestoreStep.ROWS: StepCost(2.2, 7e-7),
    RestoreStep.LARGE_OBJECTS: StepCost(0.5, 4e-8),
    RestoreStep.INDEXES: StepCost(0.1, 3e-7),
    RestoreStep.SWAP: StepCost(0.02),
}
# Without Spark, no workers start.
BY_COMMAND = {**COSTS, RestoreStep.ROWS: StepCost(0.2, 1e-6)}
# With more changes than the driver folds, the fold starts Spark's workers; otherwise the load starts them.
BY_SEGMENT = {**COSTS, RestoreStep.FOLD: StepCost(3.0, 2e-6), RestoreStep.ROWS: StepCost(0.3, 5.5e-7)}
BY_SEGMENT_IN_COMMAND = {**BY_SEGMENT, RestoreStep.FOLD: StepCost(0.03, 1.3e-6), RestoreStep.ROWS: StepCost(0.2, 1e-6)}
# With more keys than the driver can compare in memory (approximately this many), all changes are shuffled.
KEYS_MAX = 4_000_000
BY_ROWS = {**COSTS, RestoreStep.FOLD: StepCost(8.0, 3.6e-6), RestoreStep.ROWS: StepCost(1.0, 1.3e-6)}

# Repeating a 20-second restore may take up to a fifth longer, and a restore of a different size is a worse predictor.
SURE_SECONDS_MIN, SURE_SIZES_MAX = 30.0, 1.5
SURE_FACTOR, ROUGH_FACTOR_MIN = 1.25, 2.0
# The constants apply to an idle machine. A busy machine with slow disks took 31 times as long, mostly to start Spark.
MEASURED_FACTOR_MAX, UNMEASURED_FACTOR_MAX = 3.0, 10.0


class Estimate(Struct, frozen=True):
    """The expected seconds by step; `fixed` is the part that passes before the step makes any progress.

    `basis` is the operation in which the figures were measured, or "" if the constants were used. The estimate
    `is_rough`, which means that it may be off by more than a fifth, if the two restores differ greatly in size or if
    the new restore is short or resumed. `load` is the number of waiting processes per core of this machine.
    """

    seconds: Mapping[RestoreStep, float]
    amounts: Mapping[RestoreStep, int] = field(default_factory=dict)
    basis: str = ""
    fixed: Mapping[RestoreStep, float] = field(default_factory=dict)
    is_rough: bool = True
    load: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """The minimum and maximum seconds that the restore may take, given the basis and the machine's load."""
        if not self.is_rough:
            return self.total / SURE_FACTOR, self.total * SURE_FACTOR
        most = (MEASURED_FACTOR_MAX if self.basis else UNMEASURED_FACTOR_MAX) * (1 + self.load)
        return self.total / ROUGH_FACTOR_MIN, self.total * most

    @property
    def total(self) -> float:
        """The expected seconds of all steps."""
        return sum(self.seconds.values())


def amounts_of(volumes: Iterable[ShardVolume], *, needs_spark: bool = True) -> dict[RestoreStep, int]:
    """Return the amount of work in each step that has any."""
    volumes = list(volumes)
    changes, rows = (
        sum(volume.changes for volume in volumes),
        sum(volume.row_count - volume.loaded for volume in volumes),
    )
    amounts = {
        RestoreStep.DATABASES: sum(volume.tables for volume in volumes),
        RestoreStep.SPARK: 0,
        RestoreStep.FOLD: changes,
        RestoreStep.ROWS: rows + (changes if costs_of(changes) is BY_ROWS else 0),
        RestoreStep.LARGE_OBJECTS: sum(volume.large_bytes for volume in volumes),
        RestoreStep.INDEXES: sum(volume.index_work for volume in volumes),
        RestoreStep.SWAP: 0,
    }
    skipped = {RestoreStep.LARGE_OBJECTS} if needs_spark else {RestoreStep.LARGE_OBJECTS, RestoreStep.SPARK}
    if not rows and not changes:
        skipped |= {RestoreStep.SPARK, RestoreStep.FOLD, RestoreStep.ROWS}
    return {step: amount for step, amount in amounts.items() if amount or step not in skipped}


def estimate_restore(
    volumes: Iterable[ShardVolume],
    measured: RestoreFigures | None = None,
    basis: str = "",
    *,
    is_resumed: bool = False,
    needs_spark: bool = True,
    load: float = 0.0,
    bytes_per_second: int | None = None,
) -> Estimate:
    """Estimate a restore, or its remaining part, from the figures `measured` in operation `basis`, if any.

    `bytes_per_second` limits the rate of loading rows and large objects into each shard's database.
    """
    volumes = list(volumes)
    amounts = amounts_of(volumes, needs_spark=needs_spark)
    taken = measured.steps if measured else {}
    costs = costs_of(amounts.get(RestoreStep.FOLD, 0), needs_spark=needs_spark)
    folded = taken.get(RestoreStep.FOLD)
    if folded and costs_of(folded.amount, needs_spark=RestoreStep.SPARK in taken) is not costs:
        # Figures for one kind of fold or load predict nothing about another.
        taken = {step: figures for step, figures in taken.items() if step not in (RestoreStep.FOLD, RestoreStep.ROWS)}
    scaled = {step: costs[step].scaled(taken[step]) if step in taken else costs[step] for step in amounts}
    seconds = {step: scaled[step].seconds(amount) for step, amount in amounts.items()}
    if bytes_per_second is not None:
        least = least_seconds(volumes, bytes_per_second)
        seconds |= {step: max(seconds[step], least[step]) for step in least if step in seconds}
    is_short = sum(seconds.values()) < SURE_SECONDS_MIN
    is_rough = is_resumed or is_short or not _are_alike(amounts, taken)
    return Estimate(seconds, amounts, basis, {step: scaled[step].fixed for step in amounts}, is_rough, load)


def least_seconds(volumes: Iterable[ShardVolume], bytes_per_second: int) -> dict[RestoreStep, float]:
    """Return how long loading takes at least at this rate. Databases are loaded at once, so the largest decides."""
    rows = large = 0.0
    for volume in volumes:
        share_left = 1 - volume.loaded / volume.row_count if volume.row_count else 0.0
        rows = max(rows, PAGE_BYTES_PER_STORED_BYTE * volume.base_bytes * share_left)
        large = max(large, volume.large_bytes)
    return {RestoreStep.ROWS: rows / bytes_per_second, RestoreStep.LARGE_OBJECTS: large / bytes_per_second}


def machine_load() -> float:
    """Return the number of waiting processes per core of this machine, averaged over the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _are_alike(amounts: Mapping[RestoreStep, int], taken: Mapping[str, StepFigures]) -> bool:
    now, then = amounts.get(RestoreStep.ROWS, 0), taken.get(RestoreStep.ROWS)
    return then is not None and max(now, then.amount) <= SURE_SIZES_MAX * min(now, then.amount)


def costs_of(changes: int, *, needs_spark: bool = True) -> Mapping[RestoreStep, StepCost]:
    """Return the costs of a restore, given the kind of fold that this many changes need (snapshots/fold/limits.py)."""
    if changes <= CHANGES_MAX:
        return COSTS if needs_spark else BY_COMMAND
    if changes > KEYS_MAX:
        return BY_ROWS
    return BY_SEGMENT if needs_spark else BY_SEGMENT_IN_COMMAND
