"""What a restore into other targets refuses, by name and before the targets are touched, or else leaving nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.plan.topology import LargeObjectsUnroutedError, SourcesDifferError
from cutline.restore.run.conflicts import KeyConflictError
from cutline.restore.run.refused import DdlRefusedError
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.table_routes import RowWithoutTargetError
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.storage.errors import UsageError
from tests.integration.refusing import execute
from tests.integration.routing.routed_place import (
    BAD,
    DIFFERENT,
    NAME,
    OTHER_DEFINITIONS,
    ROUTES,
    SHARDS,
    SINGLE,
    TABLES,
    RoutedPlace,
)

# Publications with Cutline's names, which a node may have alone: they are no difference.
LEFT_BY_ANOTHER_FLEET = """
CREATE PUBLICATION cutline_0123abcd_append_only FOR TABLE rate, account;
COMMENT ON PUBLICATION cutline_0123abcd_append_only IS 'its settings before'
"""
# What belongs to one server: init asks for such grants where a standby is.
OF_ONE_SERVER = """
GRANT EXECUTE ON FUNCTION pg_read_file(text) TO pg_monitor;
GRANT CREATE ON DATABASE bank TO pg_monitor;
COMMENT ON DATABASE bank IS 'the second';
ALTER DATABASE bank SET work_mem = '5MB';
ALTER DATABASE bank OWNER TO other
"""


@dataclass(slots=True)
class Counted(Silent):
    """Keeps the units of the steps that count something, by name."""

    begun: tuple[str, str] = ("", "")
    units: dict[str, str] = field(default_factory=dict)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self.begun = (name, unit)

    def advance(self, done: int) -> None:
        name, self.units[name] = self.begun


def test_tables_without_a_route_are_refused_all_by_name(place: RoutedPlace) -> None:
    with pytest.raises(UsageError) as raised:
        place.plan(2, "public.account=hash(id)", "public.l*=hash(what)")
    assert "lacks" not in raised.value.hint
    left = sorted({f"public.{table}" for table in TABLES} - {"public.account", "public.log"})
    assert raised.value.details["tables"] == left
    assert all(table in raised.value.message for table in left)
    # Perhaps a shard was added since the file was written.
    with pytest.raises(UsageError) as raised:
        place.plan(2)
    assert (
        f"lacks {', '.join(f's{number}' for number in range(1, SHARDS + 1))}: add a [[node]] for each"
        in raised.value.hint
    )
    with pytest.raises(UsageError, match="no stored column nothing"):
        place.plan(2, "*=hash(nothing)")
    with pytest.raises(UsageError, match="has type integer"):
        place.plan(2, "*.log=column(at)", *ROUTES)
    with pytest.raises(UsageError, match="has type numeric"):
        place.plan(2, "public.rate=hash(value)", *ROUTES)
    with pytest.raises(UsageError, match="3 bounds for 2 targets"):
        place.plan(2, "public.account=range(id, 1, 2, 3)", *ROUTES)
    with pytest.raises(UsageError, match="the target has no node s1"):
        place.plan(2, "public.account=node('s1')", *ROUTES)
    with pytest.raises(UsageError, match=r"matches public\.acount"):
        place.plan(2, "public.acount=hash(id)", *ROUTES)


def test_keys_of_several_sources_and_tables_that_differ_are_found_before_anything_is_created(
    place: RoutedPlace,
) -> None:
    # The rates are on all shards with the same keys, and the logs are not the same on any two.
    plan = place.plan(2, "public.rate=hash(code)", "public.log=all", *ROUTES)
    counted = Counted()
    with pytest.raises(KeyConflictError) as raised:
        restore_fleet(plan, place.runs.spark, counted)
    assert counted.units == {"compare keys of the sources": "tasks"}
    totals = raised.value.details["totals"]
    lines = {line for rows in place.truth for line in rows["log"]}
    differing = {line for line in lines if len({rows["log"].count(line) for rows in place.truth}) > 1}
    assert differing
    assert totals == {"public.rate": 5, "public.log": len(differing)}
    assert "public.rate key (r1) on s1, s2, s3 for t" in raised.value.message
    assert raised.value.exit_code == 3
    assert place.databases() == set()


def test_a_row_without_a_target_is_named_and_nothing_is_left(place: RoutedPlace) -> None:
    # With several sources it is found before anything is created, with one in the load.
    with pytest.raises(RowWithoutTargetError, match=r"public.account of s[123] has rows with region = (nowhere|\\N)"):
        place.restore(place.plan(3, "public.account=column(region)", increment=BAD, groups=("public.account",)))
    assert place.databases() == set()
    request = RestoreRequest(SINGLE, routes=("public.account=range(id, 3, 50)", "*=node('t1')"))
    plan = plan_restore(place.single.fleet, place.target(2), request)
    with pytest.raises(RowWithoutTargetError, match=r"id = [12], .* the lowest bound is 3"):
        restore_fleet(plan, place.runs.spark, Silent())
    assert place.databases() == set()


def test_a_unique_value_of_two_sources_leaves_the_restore_to_the_operator(place: RoutedPlace) -> None:
    plan = place.plan(1, increment=BAD, groups=("public.badge",))
    with pytest.raises(DdlRefusedError, match="badge_code_key"):
        place.restore(plan)
    assert [name.startswith("elsewhere_restoring_") for name in place.databases()] == [True]
    abandon_restore(place.runs.fleet, plan.target_fleet, plan.request.name, print, Silent())
    assert place.databases() == set()


def test_shards_with_different_definitions_are_refused_by_name(place: RoutedPlace) -> None:
    execute(place.servers.dsns()[1], OTHER_DEFINITIONS, LEFT_BY_ANOTHER_FLEET, OF_ONE_SERVER)
    place.runs.increment(NAME)
    with pytest.raises(SourcesDifferError) as raised:
        place.plan(1, increment=DIFFERENT)
    named = [str(one).partition(" of s1 and s2")[0] for one in raised.value.details["differences"]]  # type: ignore[attr-defined]
    assert named == ["table public.badge", "FUNCTION public.helper()", "TABLE public.log"]
    assert raised.value.exit_code == 3
    # With targets of their own they may differ.
    same = place.folder / "same.toml"
    same.write_text(place.target(SHARDS).path.read_text().replace('"t', '"s'))
    assert place.plan_into(same, DIFFERENT).topology is None


def test_large_objects_have_no_route(place: RoutedPlace) -> None:
    dsn = place.servers.dsns()[0]
    execute(dsn, "SELECT lo_from_bytea(4711, 'large')")
    try:
        place.single.full("large", large_objects=True)
        with pytest.raises(LargeObjectsUnroutedError, match="1 on s1"):
            plan_restore(place.single.fleet, place.target(1), RestoreRequest("large"))
        plan = plan_restore(place.single.fleet, place.target(1), RestoreRequest("large", groups=("*.rate",)))
        assert plan.topology is not None
    finally:
        execute(dsn, "SELECT lo_unlink(4711)")
