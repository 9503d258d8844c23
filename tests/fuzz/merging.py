"""Merges cases into one, each on its own shards: most costs of a run arise once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from tests.fuzz.script import Case, Transaction
from tests.fuzz.tables import SHARDS

# The options of one shard's databases; all others are options of the run.
DATABASE_OPTIONS = ("encoding", "set ")


def merge_cases(cases: Sequence[Case]) -> Case:
    """Merge the cases; the first one's options say how they are run and judged."""
    parts = [shift_shards(case, len(SHARDS) * place) for place, case in enumerate(cases)]
    options = {name: value for name, value in cases[0].options.items() if not name.startswith(DATABASE_OPTIONS)}
    for part in parts:
        options |= {name: value for name, value in part.options.items() if name.startswith(DATABASE_OPTIONS)}
    intervals = zip_longest(*(part.intervals for part in parts), fillvalue=())
    return Case(
        tuple(one for part in parts for one in part.setup),
        tuple(tuple(one for interval in several for one in interval) for several in intervals),
        options,
    )


def shift_shards(case: Case, by: int) -> Case:
    """The case on shards that are `by` further."""

    def move(one: Transaction) -> Transaction:
        return replace(one, parts=tuple((shard + by, statements) for shard, statements in one.parts))

    options = {
        f"{name} on {shard + by}" if name.startswith(DATABASE_OPTIONS) else name: value
        for name, value in case.options.items()
        for shard in SHARDS
    }
    setup = tuple((tuple(shard + by for shard in shards), statement) for shards, statement in case.setup)
    return Case(setup, tuple(tuple(move(one) for one in interval) for interval in case.intervals), options)


def options_on(options: Mapping[str, str], shard: int) -> dict[str, str]:
    """The options of one shard and those of all shards."""
    found = ((*name.partition(" on "), value) for name, value in options.items())
    return {name: value for name, _, of, value in found if of in ("", str(shard))}
