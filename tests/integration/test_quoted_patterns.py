"""Patterns with names as SQL quotes them select tables, and init and create name patterns that match nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from cutline.fleet.config import GroupRules
from cutline.fleet.progress import Noting, Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.create.initialise import initialise
from cutline.storage.errors import UsageError
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "quoted"
ORDER, LINE, RESERVED = "Tenant 01 GmbH.Order", "Tenant 01 GmbH.Line Item", "select.table"
DOTTED, LOG = '"Tenant 02 Ltd.".Order', "public.log"
SCHEMA = (
    'CREATE SCHEMA "Tenant 01 GmbH"; CREATE SCHEMA "Tenant 02 Ltd."; CREATE SCHEMA "select"',
    'CREATE TABLE "Tenant 01 GmbH"."Order" (id int PRIMARY KEY)',
    'CREATE TABLE "Tenant 01 GmbH"."Line Item" (id int PRIMARY KEY)',
    'CREATE TABLE "Tenant 02 Ltd."."Order" (id int PRIMARY KEY)',
    'CREATE TABLE "select"."table" (id int PRIMARY KEY)',
    "CREATE TABLE log (what text)",
    "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY LIST (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
    *(
        f"INSERT INTO {table} VALUES (1)"
        for table in ('"Tenant 01 GmbH"."Order"', '"Tenant 02 Ltd."."Order"', '"select"."table"', "parted")
    ),
)
MISTAKES = GroupRules(
    include=("public.*", '"Tenant 01 GmbH"."Order"', '"select"."Table"'),
    exclude=("public.parted",),
    append_only=('"public"."log"', "scratch.*"),
)
INCLUDED = (
    'warning: [groups] include: "select"."Table" matches no table on any shard, so it includes nothing (same name in'
    " other case: select.table   (patterns are case-sensitive))"
)
EXCLUDED = (
    "warning: [groups] exclude: public.parted matches no table on any shard, so it excludes nothing (the rows of"
    " public.parted are in its partitions: public.parted_1)"
)
APPENDED = "warning: [groups] append_only: scratch.* matches no table on any shard, so it has no effect"


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, "quoted") as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        yield Runs(fleet, Ready(spark))


def with_rules(runs: Runs, rules: GroupRules) -> Runs:
    return replace(runs, fleet=replace(runs.fleet, groups=rules))


def test_rules_of_the_fleet_file_may_quote_names_as_sql_does(runs: Runs) -> None:
    rules = GroupRules(
        include=("public.*", '"Tenant 01 GmbH".*', '"select"."table"'),
        exclude=('"Tenant 01 GmbH"."Line Item"',),
        append_only=('"public"."log"',),
    )
    noting = Noting(Silent())
    report = initialise(with_rules(runs, rules).fleet, noting)
    (published,) = report.groups.values()
    assert set(published) == {ORDER, RESERVED, LOG, "public.parted_1"}
    assert report.append_only == {"s1": [LOG]}
    assert report.unmatched == ()
    assert not [note for note in noting.notes if "matches no table" in note]


def test_a_restore_takes_names_as_sql_quotes_them(runs: Runs) -> None:
    execute(runs.fleet.nodes[0].dsn, "DROP TABLE log")
    runs.init()
    runs.full(NAME)
    target = restore_target(runs.fleet)
    for groups, schemas, expected in (
        (('"Tenant 01 GmbH"."Order"',), (), {ORDER}),
        (('"Tenant 02 Ltd."."Order"',), (), {DOTTED}),
        ((), ('"Tenant 02 Ltd."',), {DOTTED}),
        ((), ("Tenant 02 Ltd.",), {DOTTED}),
    ):
        request = RestoreRequest(NAME, groups=groups, scope=RestoreScope(schemas=schemas))
        plan = plan_restore(runs.fleet, target, request)
        assert {group.name for group in plan.request.tables.of(plan.chain.groups("s1"))} == expected
    runs.restore(NAME, target, groups=('"select"."table"',), scope=RestoreScope(schemas=('"Tenant 02 Ltd."',)))
    filled = {name for name, rows in sorted_copies(target.nodes[0].dsn).items() if rows}
    assert filled == {'"Tenant 02 Ltd."."Order"', '"select"."table"'}
    with pytest.raises(UsageError, match="no table with rows") as refused:
        plan_restore(runs.fleet, target, RestoreRequest(NAME, groups=('"select"."TABLE"',)))
    assert "same name in other case: select.table" in refused.value.hint


def test_patterns_that_match_nothing_are_named(runs: Runs) -> None:
    mistaken = with_rules(runs, MISTAKES)
    noting = Noting(Silent())
    report = initialise(mistaken.fleet, noting)
    assert [f"warning: {one.text}" for one in report.unmatched] == [INCLUDED, EXCLUDED, APPENDED]
    assert [note for note in noting.notes if "matches no table" in note] == [INCLUDED, EXCLUDED, APPENDED]

    noting = Noting(Silent())
    request = CreateRequest(NAME, include=('"Tenant 02 Ltd."."Order"', "Order"), exclude=("nothing.*",))
    plan = preview_full(mistaken.fleet, request, noting)
    assert [table.group.name for table in plan.tables["s1"]] == [DOTTED]
    assert [note for note in noting.notes if "matches no table" in note] == [
        "warning: --group Order matches no table on any shard, so it includes nothing (a pattern is schema.table:"
        f" {DOTTED}, {ORDER})",
        EXCLUDED,
        "warning: --exclude-group nothing.* matches no table on any shard, so it excludes nothing",
        APPENDED,
    ]


def test_an_increment_names_only_patterns_that_are_new(runs: Runs) -> None:
    mistaken = with_rules(runs, MISTAKES)
    mistaken.init()
    mistaken.full(NAME)
    more = with_rules(runs, structs.replace(MISTAKES, exclude=(*MISTAKES.exclude, '"Tenant 02 Ltd"."Order"')))
    for fleet, expected in ((mistaken.fleet, 0), (more.fleet, 1)):
        noting = Noting(Silent())
        preview_increment(fleet, CreateRequest(NAME), noting)
        assert sum("matches no table" in note for note in noting.notes) == expected
    create_increment(more.fleet, CreateRequest(NAME), more.spark, noting)
    assert sum('exclude: "Tenant 02 Ltd"."Order" matches no table' in note for note in noting.notes) == 2
