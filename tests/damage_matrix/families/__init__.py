"""The families of kinds, by what they damage."""

from __future__ import annotations

from functools import cache

from tests.damage_matrix.families import commits, contents, ddl, merged, raw, records, replaced, rows, segments
from tests.damage_matrix.kinds import Kind

MODULES = (raw, replaced, rows, segments, commits, ddl, contents, records, merged)


@cache
def all_kinds() -> tuple[Kind, ...]:
    """Return every kind of damage, family by family."""
    kinds = [kind for module in MODULES for kind in module.kinds()]
    families = list(dict.fromkeys(kind.family for kind in kinds))
    return tuple(sorted(kinds, key=lambda kind: families.index(kind.family)))
