"""The record of the largest fleet that a store has served; snapshots/operations/majority.py uses it."""

from __future__ import annotations

from cutline.fleet.record import Record


class RecordedPrimary(Record, frozen=True):
    """One primary that granted its lock to an operation."""

    node: str
    system_identifier: str


class BaselineRecord(Record, frozen=True, tag_field="schema", tag="cutline/baseline/1"):
    """The recorded primaries. An operator has removed the nodes `forgotten` from the fleet (`init --forget-nodes`)."""

    id: str
    primaries: tuple[RecordedPrimary, ...]
    forgotten: tuple[str, ...]


def baseline_key(number: int) -> str:
    """The key of record `number`; numbers start at 1."""
    return f"baselines/{number:016d}.json"
