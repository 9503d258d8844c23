"""The kinds that `make test` tries: the first of each family of sealed damage that a check finds.

A check takes seconds, and a restore several times as long, so the sample restores nothing. Raw damage is left to the
tests of tests/integration/damage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tests.damage_matrix.kinds import Found, Kind


def fixed_sample(kinds: Iterable[Kind], missed: Collection[str]) -> list[Kind]:
    """Return the kinds; those in `missed` are not found."""
    chosen: dict[str, Kind] = {}
    for kind in kinds:
        if isinstance(kind.expected, Found) and kind.id not in missed and not kind.family.startswith("raw"):
            chosen.setdefault(kind.family, kind)
    return list(chosen.values())
