"""What is left out of a snapshot, as the text output shows it, and the warnings that every output has."""

from __future__ import annotations

import json

from cutline.cli.output.left_out import left_out_lines, left_out_since, warning_lines, warnings_of_several
from cutline.fleet.record import fields_of, from_json
from cutline.nodes.left_out import (
    COUNTED,
    WARNED,
    LeftOut,
    LeftOutKind,
    absent_copy,
    mark_large_objects,
    select_warnings,
)

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
        "not in the snapshot: 1,234 large objects (not restored): 1,200 on a; 34 on b; a full snapshot includes them"
        " with --large-objects, or with large_objects = true under [groups] in fleet.toml",
    ]
    assert left_out_lines([]) == []


def test_a_long_list_says_how_many_more_there_are() -> None:
    (line,) = left_out_lines(LeftOut("a", EXCLUDED, f"t.n{number}", "") for number in range(1010))
    assert line.startswith("not in the snapshot: 1,010 excluded tables (empty when restored): t.n0 on a; ")
    assert line.endswith("; t.n7 on a and 1,002 more")
    appended = [LeftOut("a", LeftOutKind.APPEND_ONLY_TABLE, f"t.n{number}", "") for number in range(9)]
    assert warning_lines(appended)[0].endswith("t.n7 and 1 more")


def test_every_kind_has_a_line() -> None:
    for kind in LeftOutKind:
        (line,) = left_out_lines([LeftOut("a", kind, "the.name", "", 1)])
        assert ("the.name" in line) != (kind in COUNTED)
        assert line.startswith("warning: " if kind in WARNED else "not in the snapshot: 1 ")


def test_an_entry_round_trips_through_json() -> None:
    one = LeftOut("a", LARGE, "pg_largeobject", "why", 3)
    document = {"node": "a", "kind": "large_objects", "name": "pg_largeobject", "why": "why", "count": 3}
    assert fields_of(one) == document
    assert from_json(json.dumps(document), LeftOut) == one


def test_a_warning_of_several_snapshots_appears_once() -> None:
    log, bag = (LeftOut("a", LeftOutKind.APPEND_ONLY_TABLE, f"t.{name}", "") for name in ("log", "bag"))
    first, second = warnings_of_several({"one": [log], "two": [log], "three": [bag], "four": []})
    # What helps is said by `show` of each.
    assert first == "warning: only inserts and truncates are captured, not updates and deletes: t.log (in one; two)"
    assert second == "warning: only inserts and truncates are captured, not updates and deletes: t.bag (in three)"


def test_an_increment_names_what_is_new_and_counts_the_rest() -> None:
    before = [
        LeftOut("a", LARGE, "pg_largeobject", "", 1200),
        LeftOut("a", UNLOGGED, "t.x", ""),
        LeftOut("b", UNLOGGED, "t.x", ""),
        LeftOut("a", LeftOutKind.APPEND_ONLY_TABLE, "t.log", ""),
        LeftOut("a", LeftOutKind.UNCOUNTED_TABLE, "t.log", ""),
    ]
    now = [LeftOut("a", LARGE, "pg_largeobject", "", 1300), *before[1:]]
    uncounted, rest = left_out_since(now, before, "daily")
    # That counters don't count is of this increment, whatever was before.
    assert uncounted.startswith("warning: it is unknown whether rows of append-only tables were updated or deleted")
    assert rest == (
        "left out as before: 1 unlogged table (empty when restored), 1,300 large objects (not restored),"
        " 1 append-only table (without updates and deletes); see: snapshot show daily"
    )
    new = LeftOut("a", UNLOGGED, "t.y", "")
    assert left_out_since([*now[:2], new], before, "daily") == [
        "not in the snapshot: 1 unlogged table (empty when restored): t.y on a",
        "left out as before: 1 unlogged table (empty when restored), 1,300 large objects (not restored);"
        " see: snapshot show daily",
    ]
    assert left_out_since(now, (), "daily") == left_out_lines(now)
    # Every kind is either counted or always named.
    for kind in set(LeftOutKind) - {LeftOutKind.UNCOUNTED_TABLE, LeftOutKind.ABSENT_COPY}:
        one = LeftOut("a", kind, "the.name", "", 1)
        assert left_out_since([one], [one], "daily")[0].startswith("left out as before: 1 ")


def test_a_standby_that_is_left_out_is_named_each_time_with_the_reason() -> None:
    away = absent_copy("a", "a-b1", "no answer within 2 s")
    assert away.why == "its copy is left out: no answer within 2 s"
    later = absent_copy("a", "a-b1", "no answer within 2 s", 3)
    assert later.why == "its copy is left out since increment 3: no answer within 2 s"
    expected = "warning: copies of standbys are left out, so check can't compare them: a-b1 (no answer within 2 s)"
    assert left_out_since([away], [away], "daily") == left_out_lines([away]) == [expected]


def test_stored_large_objects_are_marked_as_of_the_full_snapshot_and_not_as_left_out() -> None:
    found = [LeftOut("a", LARGE, "pg_largeobject", "why", 3), LeftOut("a", UNLOGGED, "t.x", "why")]
    kept, then = mark_large_objects(found, {"a": (2, "0/1F")})
    assert (kept.name, then.kind, then.count) == ("t.x", LeftOutKind.LARGE_OBJECTS_OF_FULL, 2)
    assert then.why == "restored as they were at the full snapshot (0/1F): increments do not capture their changes"
    assert select_warnings((kept, then)) == (then,)
