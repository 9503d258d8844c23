"""Segments that no drain has written, with correct digests: check names them as damage, and it is no bug."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pyarrow as pa
import pytest

import cutline.check.verify
from tests.integration.damage.stored_chain import NAME, StoredChain
from tests.run.soak import first_of_each
from tests.stores.damage import change_segment, with_value


def in_one_place(changes: pa.Table, events: pa.Table) -> tuple[pa.Table, pa.Table]:
    return pa.concat_tables([changes, events]), events.slice(0, 0)


def exchanged(changes: pa.Table, events: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The last change and the first event: as many rows as should be are in each place."""
    last = len(changes) - 1
    return (
        pa.concat_tables([changes.slice(0, last), events.slice(0, 1)]),
        pa.concat_tables([changes.slice(last), events.slice(1)]),
    )


@pytest.mark.parametrize(
    ("layout", "node", "held_bytes_max"),
    first_of_each(product([in_one_place, exchanged], ["s1", "s2-b1"], [0, cutline.check.verify.STORED_BYTES_MAX])),
)
def test_events_where_a_create_would_not_read_them_are_damage(
    stored: StoredChain,
    monkeypatch: pytest.MonkeyPatch,
    layout: Callable[[pa.Table, pa.Table], tuple[pa.Table, pa.Table]],
    node: str,
    held_bytes_max: int,
) -> None:
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", held_bytes_max)
    change_segment(stored.store, NAME, 1, node, lambda table: table, layout)
    found = [one for one in stored.conflicts() if one.kind == "rows"]
    assert [one.node for one in found] == [node]


@pytest.mark.parametrize(
    ("op", "column", "value", "why"),
    [
        ("P", "global_id", None, "an event of a two-phase transaction without a global id"),
        ("U", "group", -1, "a change without a group, or an event with a group"),
    ],
)
def test_rows_that_no_drain_writes_are_damage_and_no_bug(
    stored: StoredChain, op: str, column: str, value: object, why: str
) -> None:
    """Whoever can write to a store without encryption can seal anything."""

    def change(table: pa.Table) -> pa.Table:
        first = table["op"].to_pylist().index(ord(op))
        return with_value(table, first, column, value)

    change_segment(stored.store, NAME, 1, "s1", change)
    found = [one for one in stored.conflicts() if one.kind == "rows"]
    assert [one.node for one in found] == ["s1"]
    assert why in found[0].detail
