"""How long a restore takes: seconds by step, from the volume and what an earlier restore took.

A step takes a fixed time and a time in proportion to its amount of work. The constants are of two cores that run both
Spark and all servers; where a restore into any fleet has recorded what it took, the constants are scaled to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cutline.restore.estimates.volumes import ShardVolume
from cutline.snapshots.fold.limits import CHANGES_MAX
from cutline.snapshots.records.restore_figures import RestoreFigures, StepFigures


class RestoreStep(StrEnum):
    """The steps of a restore, in order, as progress names them."""

    DATABASES = "create databases"
    SPARK = "start Spark"
    FOLD = "fold changes"
    ROWS = "load rows"
    LARGE_OBJECTS = "load large objects"
    INDEXES = "indexes and constraints"
    SWAP = "swap databases"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The seconds of a step: fixed, and for each unit of its work."""

    fixed: float
    per_unit: float = 0.0

    def seconds(self, amount: int) -> float:
        """The seconds of a step with this amount of work."""
        return self.fixed + self.per_unit * amount

    def scaled(self, measured: StepFigures) -> StepCost:
        """The cost by which the step took what was measured; what was too little to be seen stays as it is."""
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
# With more changes than the driver folds, the fold starts Spark's workers, which the load has to do else.
BY_SEGMENT = {**COSTS, RestoreStep.FOLD: StepCost(3.0, 2e-6), RestoreStep.ROWS: StepCost(0.3, 5.5e-7)}
# With more keys than it compares, too, all changes are shuffled. About so many fit into its memory.
KEYS_MAX = 4_000_000
BY_ROWS = {**COSTS, RestoreStep.FOLD: StepCost(8.0, 3.6e-6), RestoreStep.ROWS: StepCost(1.0, 1.3e-6)}

# The same restore of 20 s takes up to a fifth longer another time, and one of another size says less (time_left.py).
SURE_SECONDS_MIN, SURE_SIZES_MAX = 30.0, 1.5


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected seconds by step, and how many of these pass before the step gets through any of its work.

    `basis` is the operation whose figures they are based on, "" for constants. It `is_rough` if that restore was not of
    about this size, or this one is short, or resumed: then it may be off by more than a fifth.
    """

    seconds: Mapping[RestoreStep, float]
    amounts: Mapping[RestoreStep, int] = field(default_factory=dict)
    basis: str = ""
    fixed: Mapping[RestoreStep, float] = field(default_factory=dict)
    is_rough: bool = True

    @property
    def total(self) -> float:
        """The expected seconds of the whole."""
        return sum(self.seconds.values())


def amounts_of(volumes: Iterable[ShardVolume]) -> dict[RestoreStep, int]:
    """The amount of work of every step that there is any of."""
    volumes = list(volumes)
    changes, rows = sum(one.changes for one in volumes), sum(one.row_count - one.loaded for one in volumes)
    amounts = {
        RestoreStep.DATABASES: sum(one.tables for one in volumes),
        RestoreStep.SPARK: 0,
        RestoreStep.FOLD: changes,
        RestoreStep.ROWS: rows + (changes if costs_of(changes) is BY_ROWS else 0),
        RestoreStep.LARGE_OBJECTS: sum(one.large_bytes for one in volumes),
        RestoreStep.INDEXES: sum(one.index_work for one in volumes),
        RestoreStep.SWAP: 0,
    }
    skipped = {RestoreStep.LARGE_OBJECTS}
    if not rows and not changes:
        skipped |= {RestoreStep.SPARK, RestoreStep.FOLD, RestoreStep.ROWS}
    return {step: amount for step, amount in amounts.items() if amount or step not in skipped}


def estimate_restore(
    volumes: Iterable[ShardVolume], measured: RestoreFigures | None = None, basis: str = "", *, is_resumed: bool = False
) -> Estimate:
    """The estimate of a restore, or of the rest of one, by the figures of operation `basis` if it has any."""
    amounts = amounts_of(volumes)
    taken = measured.steps if measured else {}
    costs = costs_of(amounts.get(RestoreStep.FOLD, 0))
    folded = taken.get(RestoreStep.FOLD)
    if folded and costs_of(folded.amount) is not costs:
        # One way of folding says nothing of another.
        taken = {step: one for step, one in taken.items() if step not in (RestoreStep.FOLD, RestoreStep.ROWS)}
    scaled = {step: costs[step].scaled(taken[step]) if step in taken else costs[step] for step in amounts}
    seconds = {step: scaled[step].seconds(amount) for step, amount in amounts.items()}
    is_short = sum(seconds.values()) < SURE_SECONDS_MIN
    is_rough = is_resumed or is_short or not _are_alike(amounts, taken)
    return Estimate(seconds, amounts, basis, {step: scaled[step].fixed for step in amounts}, is_rough)


def _are_alike(amounts: Mapping[RestoreStep, int], taken: Mapping[str, StepFigures]) -> bool:
    """Whether the restore that was measured had about as many rows to load."""
    now, then = amounts.get(RestoreStep.ROWS, 0), taken.get(RestoreStep.ROWS)
    return then is not None and max(now, then.amount) <= SURE_SIZES_MAX * min(now, then.amount)


def costs_of(changes: int) -> Mapping[RestoreStep, StepCost]:
    """The costs of a restore with so many changes, by who is expected to fold them (snapshots/fold/limits.py)."""
    if changes <= CHANGES_MAX:
        return COSTS
    return BY_SEGMENT if changes <= KEYS_MAX else BY_ROWS
