"""Patterns that match no table on any shard are named, with what they may have meant."""

from __future__ import annotations

import pytest

from cutline.nodes.unmatched_patterns import Relations, unmatched_of

FIRST = (
    ("public.events", "p", 1, None),
    ("public.events_2025", "r", 2, 1),
    ("public.events_old", "r", 3, None),
    ("public.newest", "v", 4, None),
)
SECOND = (
    ("public.events", "p", 7, None),
    ("public.events_2026", "r", 8, 7),
    ("Tenant 01 GmbH.Order", "r", 9, None),
    ('"Tenant 02 Ltd.".Order', "r", 10, None),
    ("public.remote", "f", 11, None),
)


@pytest.mark.parametrize(
    ("pattern", "similar"),
    [
        ("public.events", "the rows of public.events are in its partitions: public.events_2025, public.events_2026"),
        ("public.newest", "views have no rows of their own: public.newest"),
        (
            '"tenant 01 gmbh"."order"',
            "same name in other case: Tenant 01 GmbH.Order   (patterns are case-sensitive)",
        ),
        ("Order", 'a pattern is schema.table: Tenant 01 GmbH.Order, "Tenant 02 Ltd.".Order'),
        ("scratch.*", ""),
        ("public.event_2025", "did you mean: public.events_2025, public.events_2026, public.events_old"),
    ],
)
def test_a_pattern_without_a_table_is_named(pattern: str, similar: str) -> None:
    relations = Relations()
    relations.add(FIRST)
    relations.add(SECOND)
    patterns = {"include": [pattern, "public.events_*"], "exclude": ['"Tenant 01 GmbH"."Order"', "public.remote"]}
    (unmatched,) = unmatched_of(patterns, relations)
    assert (unmatched.rule, unmatched.pattern, unmatched.similar) == ("include", pattern, similar)
    assert unmatched.text.startswith(
        f"[groups] include: {pattern} matches no table on any shard, so it includes nothing"
    )
    assert unmatched.text.endswith(f" ({similar})" if similar else "nothing")
