"""What a restore measured, as its outcome records it: the next restore's estimate is based on it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from cutline.fleet.record import Count, Record, Seconds


class StepFigures(Record, frozen=True):
    """A step of a restore, on all nodes: how long it took, and its amount of work (restore/estimates/model.py)."""

    seconds: Seconds
    amount: Count


class NodeFigures(Record, frozen=True):
    """One node's part of a restore: its rows, and how long steps took there."""

    rows: Count
    seconds: dict[str, Seconds] = field(default_factory=dict)


class RestoreFigures(Record, frozen=True):
    """The figures of a restore that loaded everything itself; `steps` by name, `nodes` by node, `bytes` as stored.

    `transactions` are those of the increments up to the cut. Early versions did not record them.
    """

    rows: Count
    bytes: Count
    seconds: Seconds
    steps: dict[str, StepFigures]
    nodes: dict[str, NodeFigures]
    transactions: Count | UnsetType = UNSET
