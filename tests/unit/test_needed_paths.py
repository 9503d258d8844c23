"""Objects that can't be maintained because functions set no search_path: one warning for each cause."""

from __future__ import annotations

import pytest

from cutline.restore.ddl.ddl import DdlEntry
from cutline.restore.ddl.statements import NeededPath
from cutline.restore.plan.report import NeededSearchPath
from cutline.restore.run.refused import CAUSES_NAMED_MAX, OBJECTS_NAMED_MAX, needed_path, path_warnings

NORM = NeededPath('"Shared Fn".norm(text)', 'ALTER FUNCTION "Shared Fn".norm(text) SET search_path = pg_catalog, "a";')


def index(node: str, number: int) -> NeededSearchPath:
    return needed_path(node, DdlEntry(number, "INDEX", f"Tenant {number:02} Ltd.", "Order_norm", ""), (NORM,))


def test_one_object_is_named_with_what_fails_and_the_remedy() -> None:
    assert path_warnings([index("A", 2)]) == [
        'node A: INDEX "Tenant 02 Ltd.".Order_norm uses functions that do not set search_path ("Shared Fn".norm(text));'
        " on PostgreSQL 17 and newer, ANALYZE and REINDEX of it will fail until you run:"
        f" {NORM.statement}"
    ]


def test_many_objects_with_one_cause_are_one_warning() -> None:
    view = needed_path("B", DdlEntry(1, "MATERIALIZED VIEW", "app", "M V", ""), (NORM,))
    (warning,) = path_warnings([*(index(node, number) for node in ("A", "B") for number in range(30)), view])
    names = ", ".join(f'INDEX "Tenant {number:02} Ltd.".Order_norm on A' for number in range(OBJECTS_NAMED_MAX))
    assert warning == (
        f"nodes A, B: 61 objects ({names} and 58 more; --json and --verbose list all) use functions that do not set"
        ' search_path ("Shared Fn".norm(text)); on PostgreSQL 17 and newer, ANALYZE, REINDEX and REFRESH of them will'
        f" fail until you run on each of these nodes: {NORM.statement}"
    )


def test_many_causes_are_counted_the_most_frequent_first() -> None:
    paths = [NeededPath(f"app.f{number}()", f"ALTER FUNCTION app.f{number}() …;") for number in range(9)]
    entries = [DdlEntry(number, "INDEX", "app", f"i{number}", "") for number in range(9)]
    single = [needed_path("A", entry, (path,)) for entry, path in zip(entries, paths, strict=True)]
    *named, last = path_warnings([*single, index("A", 1), index("A", 2)])
    assert len(named) == CAUSES_NAMED_MAX
    assert named[0].startswith("node A: 2 objects (")
    assert last.startswith("5 more objects use other functions that do not set search_path (5 causes): --json")


@pytest.mark.parametrize(
    ("kind", "schema", "name", "label"),
    [
        ("INDEX", "Tenant 02 Ltd.", "Order_idx", 'INDEX "Tenant 02 Ltd.".Order_idx'),
        ("INDEX", 'Tenant 03 " Inc', "a.b", 'INDEX "Tenant 03 "" Inc"."a.b"'),
        ("MATERIALIZED VIEW", "Tenant 10 Ltd.", "M V", 'MATERIALIZED VIEW "Tenant 10 Ltd.".M V'),
        ("FUNCTION", "app", "norm(app.kind)", "FUNCTION app.norm(app.kind)"),
        ("CONSTRAINT", "x.y", "customer customer_pkey", 'CONSTRAINT "x.y".customer customer_pkey'),
        ("SCHEMA", "", "Tenant 02 Ltd.", "SCHEMA Tenant 02 Ltd."),
    ],
)
def test_a_label_quotes_parts_with_a_dot_or_a_quote(kind: str, schema: str, name: str, label: str) -> None:
    assert DdlEntry(1, kind, schema, name, "").label == label
