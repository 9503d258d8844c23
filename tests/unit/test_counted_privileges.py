"""Privileges of extensions' objects may be many: people read their number, and what else there is beside it."""

from __future__ import annotations

from cutline.cli.output.restore_report import left_out_texts, lines_of, refused_lines
from cutline.fleet.config import Node
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.restore.ddl.ddl import POST_DATA, DdlEntry, Refusal
from cutline.restore.ddl.entries import ROWS_OF_VIEW, read_archive
from cutline.restore.ddl.unprivileged import take_superusers_part
from cutline.restore.plan.checked_ddl import count_views
from cutline.restore.plan.report import COUNT, RefusedStatement, RestoreReport, describe_refusals
from cutline.restore.targets.target import target_of
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from tests.unit.made_archives import MadeEntry, made_archive


def test_privileges_of_what_is_not_in_the_archive_are_those_of_extensions() -> None:
    """Also of a column, whose privileges depend on those of its table; schema public belongs to none."""
    made = [
        MadeEntry("TABLE", "t"),
        MadeEntry("ACL", 'TABLE "t"', dependencies=(1,)),
        MadeEntry("ACL", 'COLUMN "t"."c"', dependencies=(1, 2)),
        MadeEntry("ACL", 'SCHEMA "public"', schema=None, dependencies=(91,)),
        MadeEntry("ACL", 'SCHEMA "cron"', schema=None, dependencies=(92,)),
        MadeEntry("ACL", 'TABLE "job"', schema="cron", dependencies=(93,)),
        MadeEntry("ACL", 'COLUMN "job"."command"', schema="cron", dependencies=(93, 6)),
    ]
    ddl, done = take_superusers_part(read_archive(DdlArchive(*made_archive(made))), "drill")
    assert [one.number for one in ddl.entries] == [1, 2, 3, 4]
    assert done.privileges == {"": ['SCHEMA "cron"'], "cron": ['TABLE "job"', 'COLUMN "job"."command"']}
    assert done.left_out == {}


def test_of_many_refused_privileges_the_number_and_the_first_reason_are_shown() -> None:
    refused = [*described(5), RefusedStatement("s1", "shop", "EXTENSION pg_cron", reason="no")]
    assert refused_lines("refused", refused) == [
        "refused: privileges of 5 objects in schema partman on s1 (not yours: f0): --json lists all of them",
        "refused: s1: EXTENSION pg_cron: no",
    ]
    # Few are named; JSON and what is refused have all.
    assert refused_lines("refused", described(3)) == [
        f'refused: s1: ACL partman.FUNCTION "f{n}"(): not yours: f{n}' for n in range(3)
    ]
    assert [one.document()["object"] for one in refused[:5]] == [f'ACL partman.FUNCTION "f{n}"()' for n in range(5)]
    assert "counted" not in refused[0].document()


def test_rows_and_large_objects_are_named_before_all_else_and_views_are_counted() -> None:
    objects, where = [f"4 large objects on {shard}" for shard in "AB"], f"large objects on {COUNT} shards"
    views = [f"{ROWS_OF_VIEW} public.v{n} on A: the view is not refreshed" for n in range(8)]
    others = [f"publication p{n} on A: created by: snapshot init" for n in range(4)]
    counted = {**dict.fromkeys(objects, where), **count_views([*views, *others], "on A: they are not refreshed")}
    left_out = [*objects, *others, *views]
    assert left_out_texts(left_out, counted, objects, 3) == [
        *(f"left out: {line}" for line in (*objects, *others[:3])),
        "… and 2 more items: --verbose lists all of them",
    ]
    assert left_out_texts(left_out, counted, objects)[-2:] == [
        f"left out: {others[-1]}",
        "left out: rows of 8 materialized views on A: they are not refreshed: --json lists all of them",
    ]
    many = {f"{n} large objects on s{n}": where for n in range(1200)}
    assert left_out_texts(many, many, many, 3) == ["left out: large objects on 1,200 shards: --json lists all of them"]


def described(count: int) -> list[RefusedStatement]:
    entries = [DdlEntry(n, "ACL", "partman", f'FUNCTION "f{n}"()', "GRANT;") for n in range(count)]
    refusals = [Refusal(one, POST_DATA, f"not yours: f{one.number}", "GRANT;") for one in entries]
    return describe_refusals(target_of("s1", Node("s1", "dbname=shop"), (), "0" * 32), refusals)


def test_what_the_plan_has_said_is_not_said_again() -> None:
    report = RestoreReport(
        "daily", 0, "op", [], left_out=["publication p on s1: why"], role_differences=["node s1: role a: LOGIN"],
        not_in_snapshot=(LeftOut("s1", LeftOutKind.FOREIGN_TABLE, "public.f", "why"),),
    )  # fmt: skip
    *others, result = lines_of(report)
    assert [one.split(":")[0] for one in others] == ["differs", "left out", "not in the snapshot"]
    assert lines_of(report, is_announced=True) == [result]
