"""Several cases as one, each on shards of its own: most of what a run costs it costs once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from tests.fuzz.script import Case, Transaction
from tests.fuzz.tables import SHARDS

# What the databases of one shard are made with; everything else is of the run.
OF_DATABASES = ("encoding", "set ")


def merged(cases: Sequence[Case]) -> Case:
    """All of them at once; they are run and judged as the first of them says."""
    parts = [shifted(case, len(SHARDS) * place) for place, case in enumerate(cases)]
    options = {name: value for name, value in cases[0].options.items() if not name.startswith(OF_DATABASES)}
    for part in parts:
        options |= {name: value for name, value in part.options.items() if name.startswith(OF_DATABASES)}
    intervals = zip_longest(*(part.intervals for part in parts), fillvalue=())
    return Case(
        tuple(one for part in parts for one in part.setup),
        tuple(tuple(one for interval in several for one in interval) for several in intervals),
        options,
    )


def shifted(case: Case, by: int) -> Case:
    """The case on later shards."""

    def moved(one: Transaction) -> Transaction:
        return replace(one, parts=tuple((shard + by, statements) for shard, statements in one.parts))

    options = {
        f"{name} on {shard + by}" if name.startswith(OF_DATABASES) else name: value
        for name, value in case.options.items()
        for shard in SHARDS
    }
    setup = tuple((tuple(shard + by for shard in shards), statement) for shards, statement in case.setup)
    return Case(setup, tuple(tuple(moved(one) for one in interval) for interval in case.intervals), options)


def options_on(options: Mapping[str, str], shard: int) -> dict[str, str]:
    """Those of one shard, and those of all."""
    found = ((*name.partition(" on "), value) for name, value in options.items())
    return {name: value for name, _, of, value in found if of in ("", str(shard))}
