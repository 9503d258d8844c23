"""The kinds that `make test` tries: the first of each outcome that a family has, and one that has to be restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.damage_matrix.kinds import Doubted, Drilled, Hidden, Kind, Restorable

# A restore takes several times as long as a check.
RESTORED = ("rows: other values / single / a value of column small (the only copy)",)


def fixed_sample(kinds: Iterable[Kind], missed: Collection[str]) -> list[Kind]:
    """Return the first kind of each family and outcome of a check that is not missed, and those of RESTORED."""
    chosen: dict[tuple[object, ...], Kind] = {}
    for kind in kinds:
        if kind.id in missed:
            continue
        if not isinstance(kind.expected, Hidden | Doubted | Restorable | Drilled):
            chosen.setdefault((kind.family, type(kind.expected)), kind)
        elif kind.id in RESTORED:
            chosen[kind.id,] = kind
    return list(chosen.values())
