"""A restore of only the rows warns of a commit that its DDL contradicts; one of the DDL does not go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cutline.fleet.config import Node
from cutline.nodes.groups import Group
from cutline.restore.plan.checked_ddl import warn_of_contradictions
from cutline.restore.plan.plan import LockedTargets
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.target import Target
from cutline.snapshots.ddl.contradictions import DdlContradictedError
from tests.unit.made_definitions import MadeChain, altered


def target(shard: str, *sources: str) -> Target:
    return Target(shard, Node(shard, "dbname=shop"), "shop", "shop_restoring", "shop_aside", sources=sources)


def warnings(made: MadeChain, *targets: Target, tables: tuple[str, ...] = ()) -> list[str]:
    """What is said before rows are loaded; with `tables`, only theirs are."""

    def of(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(group for group in groups if group.table in tables)

    request = SimpleNamespace(tables=SimpleNamespace(is_partial=bool(tables), of=of))
    plan = SimpleNamespace(store=SimpleNamespace(open=lambda: made.store), chain=made.chain, request=request)
    locked: Any = SimpleNamespace(plan=plan, obstacles=Obstacles())
    warn_of_contradictions(cast("LockedTargets", locked), targets)
    assert locked.obstacles.found == []
    return list(locked.obstacles.warnings)


@pytest.fixture
def made() -> MadeChain:
    made = MadeChain.kept()
    exchanged = {"TABLE entry": ('"id" bigint NOT NULL,\n    "account"', '"account" bigint NOT NULL,\n    "id"')}
    return made.with_ddl("s1", 2, altered(made.ddl("s1", 2), exchanged))


def test_each_source_is_compared_once(made: MadeChain) -> None:
    (warning,) = warnings(made, target("a", "s1", "s2"), target("b", "s1", "s2"))
    assert warning == (
        "the commit and the stored DDL of shard s1 contradict each other: table public.entry has columns id, account,"
        " remark in the commit, but account, id, remark in the DDL"
    )
    assert warnings(made, target("s2")) == []


def test_of_a_restore_of_some_tables_only_these_are_compared(made: MadeChain) -> None:
    assert warnings(made, target("s1"), tables=("account",)) == []
    assert len(warnings(made, target("s1"), tables=("entry",))) == 1


def test_rows_are_loaded_without_ddl_that_is_damaged(made: MadeChain) -> None:
    stored = made.chain.ddl_object("s1")
    assert stored is not None
    made.store.delete(stored.key)
    assert warnings(made, target("s1")) == []


def test_the_error_says_how_to_get_the_rows_back() -> None:
    error = DdlContradictedError("s1", ["one", "another"])
    assert error.message == "the commit and the stored DDL of shard s1 contradict each other: one; another"
    assert "--data-only" in error.hint
    assert error.exit_code == 3
