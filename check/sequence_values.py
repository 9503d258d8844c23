"""Note sequences that are behind the keys that they have yielded, or behind their own earlier values.

A sequence never yields a value twice, so in the state at a cut its value is at or beyond every key that it has yielded.
But a user may insert any key, and set a sequence to any value, so that its next values exist already. Nothing in a
store distinguishes that from a value that was changed there: it is a doubt, and never a conflict. Sequences that
nothing has used, that cycle, or that are reset again and again are not noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.check.copies import Copies
from cutline.check.report import Doubt, Findings
from cutline.columns.arrow_numbers import to_mask
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.table_names import table_name
from cutline.snapshots.ddl.described_ddl import Description
from cutline.snapshots.ddl.quoted_names import Name
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence
from cutline.snapshots.records.proven_chains import point_label

# The integer types, by oid.
INTEGERS = frozenset({20, 21, 23})
NAMED_MAX = 5
# An application that resets a sequence does so again and again.
STEPS_BACK_MAX = 2
SEQUENCE = "sequence"
# The smallest and the largest key in the state at the cut, by node number and group.
KeyExtremes: TypeAlias = dict[tuple[int, int], tuple[int, int]]


def fed_groups(chain: Chain, shard: str, described: Description) -> dict[int, Name]:
    """Return the sequences that yield the whole key of a table, an integer, by the table's group at the last commit."""
    columns = {column: sequence for sequence, fed in described.fed.items() for column in fed}
    return {
        group.number: columns[place]
        for group in chain.groups(shard)
        if group.key_width == 1 and group.columns[0].type_oid in INTEGERS
        for place in [(group.schema, group.table, group.columns[0].name)]
        if place in columns
    }


def add_extremes(
    extremes: KeyExtremes, node: int, groups: Ints, keys: pa.Array, fed: Collection[int], chosen: Flags | None = None
) -> None:
    """Add the keys (binary) of the `fed` groups to `extremes`; with `chosen`, only those of the flagged rows."""
    for group in set(np.unique(groups).tolist()).intersection(fed):
        is_wanted = groups == group if chosen is None else (groups == group) & chosen
        if is_wanted.any():
            numbers = keys.filter(to_mask(is_wanted)).cast(pa.large_binary()).cast(pa.large_string()).cast(pa.int64())
            limits = pc.min_max(numbers)
            merge(extremes, {(node, group): (limits["min"].as_py(), limits["max"].as_py())})


def merge(extremes: KeyExtremes, others: Mapping[tuple[int, int], tuple[int, int]]) -> None:
    """Add other extremes to `extremes`."""
    for place, (low, high) in others.items():
        known = extremes.get(place, (low, high))
        extremes[place] = min(known[0], low), max(known[1], high)


def check_sequences(
    copies: Copies, descriptions: Mapping[str, Description], extremes: KeyExtremes, findings: Findings
) -> None:
    """Note the sequences of all shards that are behind; `extremes` are those of the primaries' copies."""
    chain = copies.chain
    for shard, described in descriptions.items():
        number = copies.nodes.index(shard)
        fed = fed_groups(chain, shard, described)
        names = {group.number: group.name for group in chain.groups(shard)}
        histories = histories_of(chain, shard)
        behind: list[Doubt] = []
        noted: set[Name] = set()
        for group, sequence_name in fed.items():
            history = histories.get(sequence_name, ())
            if history and (number, group) in extremes and (detail := _behind(history, extremes[number, group])):
                noted.add(sequence_name)
                behind.append(Doubt(SEQUENCE, detail, node=shard, group=names[group]))
        behind += [
            Doubt(SEQUENCE, detail, node=shard)
            for name, history in histories.items()
            if name not in noted
            for detail in _gone_back(chain, shard, history)
        ]
        for doubt in behind[:NAMED_MAX]:
            findings.doubt(doubt)
        if len(behind) > NAMED_MAX:
            findings.doubt(Doubt(SEQUENCE, f"{len(behind) - NAMED_MAX:,} more sequences are behind", node=shard))


History: TypeAlias = tuple[tuple[int, Sequence], ...]


def histories_of(chain: Chain, shard: str) -> dict[Name, History]:
    """Return the values of the sequences at the last commit in all commits, as (increment, sequence), in order."""
    histories: dict[Name, list[tuple[int, Sequence]]] = {(one.schema, one.name): [] for one in chain.sequences(shard)}
    for commit in chain.commits:
        for one in commit.sequences.get(shard, ()):
            if (one.schema, one.name) in histories:
                histories[one.schema, one.name].append((commit.increment, one))
    return {name: tuple(history) for name, history in histories.items()}


def _behind(history: History, limits: tuple[int, int]) -> str:
    """Describe how a sequence is behind the keys of its table; "" if it is not, or if nobody has used it."""
    _, last = history[-1]
    if last.cycles or not any(one.is_called for _, one in history):
        return ""
    furthest = limits[1] if last.increment > 0 else limits[0]
    ahead = furthest if last.increment > 0 else -furthest
    value, is_called = last.reach
    if ahead < value or (ahead == value and is_called):
        return ""
    detail = f"sequence {table_name(last.schema, last.name)} is at {last.last_value}, but the table has key {furthest}"
    further = [(number, one) for number, one in history if one.reach > last.reach]
    if further:
        number, one = further[-1]
        detail += f"; it was at {one.last_value} in {point_label(number)}"
    return f"{detail}: somebody inserted the key or set the sequence, or changed the store"


def _gone_back(chain: Chain, shard: str, history: History) -> Iterator[str]:
    """Yield how a sequence went back between two commits, if it seldom did so, and was not restarted.

    A restart is a change of DDL, or belongs to a TRUNCATE … RESTART IDENTITY.
    """
    steps = [
        (before, after)
        for before, after in pairwise(history)
        if after[1].reach < before[1].reach and not after[1].cycles and not _may_be_restarted(chain, shard, after[0])
    ]
    for (was_in, was), (now_in, now) in steps if len(steps) <= STEPS_BACK_MAX else ():
        name = table_name(now.schema, now.name)
        yield (
            f"sequence {name} was at {was.last_value} in {point_label(was_in)} and is at {now.last_value} in"
            f" {point_label(now_in)}: somebody set it back, or changed the store"
        )


def _may_be_restarted(chain: Chain, shard: str, increment: int) -> bool:
    commit = chain.commit_of(increment)
    changes = commit.definition_changes
    has_new_ddl = changes is not None and shard in changes.fingerprints
    # The WAL before a new copy of a table, which may have a TRUNCATE, is not archived.
    is_copied = changes is not None and bool(changes.copied.get(shard))
    return has_new_ddl or is_copied or any(segment.truncates for segment in commit.segments.get(shard, ()))


def keys_of(table: pa.Table | pa.RecordBatch) -> pa.Array:
    """Return the keys of rows as one array."""
    column = table.column("key")
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def fed_by_node(copies: Copies) -> dict[int, frozenset[int]]:
    """Return the fed groups of the primaries, by node number; a standby's rows are compared with its primary's."""
    return {
        number: frozenset(copies.fed.get(node, ()))
        for number, node in enumerate(copies.nodes)
        if copies.shard[node] == node and copies.fed.get(node)
    }
