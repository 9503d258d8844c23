"""What is not in a snapshot as a person reads it, and what of it an increment calls new."""

from __future__ import annotations

from cli.left_out import append_only_lines, left_out_lines
from fleet.left_out import LeftOut, LeftOutKind, left_out_from_json, since

UNLOGGED, EXCLUDED, LARGE = LeftOutKind.UNLOGGED_TABLE, LeftOutKind.EXCLUDED_TABLE, LeftOutKind.LARGE_OBJECTS


def test_a_kind_has_one_line_with_its_names_and_their_nodes() -> None:
    found = [
        LeftOut("a", LARGE, "pg_largeobject", "", 1200),
        LeftOut("a", UNLOGGED, "public.x", ""),
        LeftOut("b", UNLOGGED, "public.x", ""),
        LeftOut("b", UNLOGGED, "public.y", ""),
        LeftOut("b", LARGE, "pg_largeobject", "", 34),
    ]
    assert left_out_lines(found) == [
        "not in the snapshot: 2 unlogged tables (empty when restored): public.x on a, b; public.y on b",
        "not in the snapshot: 1,234 large objects (not restored): 1,200 on a; 34 on b",
    ]
    assert left_out_lines([]) == []


def test_a_long_list_says_how_many_more_there_are() -> None:
    (line,) = left_out_lines(LeftOut("a", EXCLUDED, f"t.n{number}", "") for number in range(1010))
    assert line.startswith("not in the snapshot: 1,010 excluded tables (empty when restored): t.n0 on a; ")
    assert line.endswith("; t.n7 on a and 1,002 more")
    assert append_only_lines(f"t.n{number}" for number in range(9))[0].endswith("t.n7 and 1 more")


def test_every_kind_has_a_line() -> None:
    for kind in LeftOutKind:
        (line,) = left_out_lines([LeftOut("a", kind, "the.name", "", 1)])
        assert "the.name" in line or kind == LARGE


def test_what_the_restored_ddl_does_not_have_is_new() -> None:
    before = [LeftOut("a", UNLOGGED, "t.old", "why"), LeftOut("a", EXCLUDED, "t.turned", "why")]
    now = [
        LeftOut("a", UNLOGGED, "t.old", "why"),
        LeftOut("a", UNLOGGED, "t.turned", "why"),
        LeftOut("a", UNLOGGED, "t.new", "why"),
        LeftOut("b", UNLOGGED, "t.old", "why"),
        LeftOut("a", LARGE, "pg_largeobject", "why", 3),
        LeftOut("a", LeftOutKind.SUBSCRIPTION, "ours", "why"),
    ]
    found = since(now, before)
    assert [(one.node, one.name) for one in found if one.why != "why"] == [("a", "t.new"), ("b", "t.old")]
    assert all("new since the full snapshot" in one.why for one in found if one.why != "why")
    assert [(one.node, one.kind, one.name, one.count) for one in found] == [
        (one.node, one.kind, one.name, one.count) for one in now
    ]


def test_an_entry_is_what_its_json_says() -> None:
    one = LeftOut("a", LARGE, "pg_largeobject", "why", 3)
    document = {"node": "a", "kind": "large_objects", "name": "pg_largeobject", "why": "why", "count": 3}
    assert one.to_json() == document
    assert left_out_from_json(document) == one
