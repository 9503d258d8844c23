"""The kinds that `make test` tries: one of each group of families of sealed damage, such as rows or commits.

A check takes seconds, and a restore several times as long, so the sample restores nothing. Raw damage is left to the
tests of tests/integration/damage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.damage_matrix.kinds import Found, Kind

RAW = "raw"


def fixed_sample(kinds: Iterable[Kind], missed: Collection[str]) -> list[Kind]:
    """Return the first kind of each group that is found; those in `missed` are not."""
    chosen: dict[str, Kind] = {}
    for kind in kinds:
        if isinstance(kind.expected, Found) and kind.id not in missed:
            chosen.setdefault(kind.family.partition(":")[0], kind)
    return [kind for group, kind in chosen.items() if group != RAW]
