"""A restore whose objects are missing or altered: refused before anything is touched, or made from standbys' copies.

The rows of every table are compared with those that PostgreSQL itself had at the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope, TableMove
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.ddl.dump import find_ddl
from cutline.storage.errors import UsageError
from cutline.wal.segments.damage import ObjectDamagedError
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.watching import Reached, Watching
from tests.integration.damage.copied_chain import DATABASE, NAME, TABLES, CopiedChain
from tests.stores.damage import flip_byte, remove, truncate

ALL = {f"public.{name}" for name in (*TABLES, "account", "transfer")}


def restore(copied: CopiedChain, increment: int | None = None, **options: bool | tuple[str, ...]) -> RestoreReport:
    request = structs.replace(RestoreRequest(NAME, increment, use_backup_copies=True), **options)  # type: ignore[arg-type]
    return restore_fleet(plan_restore(copied.fleet, copied.target, request), copied.spark, Silent())


def refused(copied: CopiedChain, increment: int | None = None, **options: bool) -> ObjectDamagedError:
    with pytest.raises(ObjectDamagedError) as error:
        restore(copied, increment, **options)
    assert copied.databases() == set()
    return error.value


def borrowed(report: RestoreReport) -> dict[tuple[str, str], set[str]]:
    return {(one.shard, one.node): set(one.groups) for one in report.borrowed}


def test_rows_that_a_primary_lacks_come_from_the_standby_and_are_those_of_the_cut(copied: CopiedChain) -> None:
    """On s1 a table that was copied again is altered, on s2 a segment is missing: one table, and all tables."""
    one, other = copied.base("s1", 1), copied.segment("s2", 2)
    copied.damage({one: flip_byte, other: remove})
    report = restore(copied)
    assert borrowed(report) == {("s1", "s1-b1"): {"public.first"}, ("s2", "s2-b1"): ALL}
    assert {(found.key, found.kind) for found in report.damaged} == {(one, "digest"), (other, "missing")}
    assert copied.restored() == copied.truth[2]
    assert copied.sequences() == [99, 99]


@pytest.mark.parametrize(("increment", "damage"), [(0, truncate), (1, flip_byte)])
def test_a_damaged_base_copy_is_replaced_at_every_increment(
    copied: CopiedChain, increment: int, damage: Callable[[Path], None]
) -> None:
    copied.damage({copied.base("s1"): damage})
    report = restore(copied, increment)
    # An empty table needs no base object, and one that was copied again not its first.
    expected = ALL - {"public.transfer"} - ({"public.first"} if increment else set())
    assert borrowed(report) == {("s1", "s1-b1"): expected}
    assert copied.restored() == copied.truth[increment]


def test_if_both_copies_are_damaged_each_table_comes_from_the_one_that_has_it(copied: CopiedChain) -> None:
    copied.damage({copied.base("s1", 1): flip_byte, copied.base("s1-b1", 2): remove})
    report = restore(copied)
    assert borrowed(report) == {("s1", "s1-b1"): {"public.first"}}
    assert copied.restored() == copied.truth[2]


def test_what_neither_copy_has_is_refused_by_name_and_nothing_is_touched(copied: CopiedChain) -> None:
    copied.damage({copied.base("s1", 1): flip_byte, copied.segment("s1-b1", 2): flip_byte})
    error = refused(copied)
    assert "increment 2 of copied lacks public.first (partition 0) of s1" in error.message
    assert error.details["lost"] == [{"shard": "s1", "what": "public.first", "partitions": 1}]
    assert {one["object"] for one in error.details["damaged"]} == {  # type: ignore[attr-defined]
        copied.base("s1", 1), copied.segment("s1-b1", 2),
    }  # fmt: skip
    # Of the first increment the standby's copy is whole.
    assert (error.details["restorable"], error.details["restorable_with_backup_copies"]) == ([0], [0, 1])
    assert "increments that can still be restored: 0;" in error.hint
    restore(copied, 1)
    assert copied.restored() == copied.truth[1]


def test_without_the_option_a_missing_object_is_an_obstacle_that_no_node_is_asked_for(copied: CopiedChain) -> None:
    copied.damage({copied.base("s2", 2): remove, copied.segment("s1", 2): truncate})
    nowhere = replace(
        copied.target,
        nodes=tuple(replace(n, dsn="postgresql://127.0.0.1:1/x") for n in copied.target.nodes),
    )
    error = plan_restore(copied.fleet, nowhere, RestoreRequest(NAME)).damage
    assert error
    assert f"snapshot restore {NAME} --use-backup-copies --increment 2" in error.hint
    assert (
        f"increments that can still be restored: 0 to 1; to restore the newest: snapshot restore {NAME}" in error.hint
    )
    scope = RestoreScope(no_owner=True, role_map=(("a", "b"),), analyze=True)
    asked = RestoreRequest(NAME, replace=True, create_roles=True, scope=scope)
    damage = plan_restore(copied.fleet, nowhere, asked).damage
    assert damage
    words = f"snapshot restore {NAME} --no-owner --role-map a=b --create-roles --replace --analyze"
    assert f"these rows: {words} --use-backup-copies --increment 2" in damage.hint
    lost = {(one["shard"], one["what"]) for one in error.details["lost"]}  # type: ignore[attr-defined]
    assert lost == {("s2", "public.second"), *(("s1", name) for name in ALL)}
    # What increment 1 needs is all there.
    assert plan_restore(copied.fleet, nowhere, RestoreRequest(NAME, 1)).damage is None


def test_an_altered_object_is_refused_while_it_is_read_and_nothing_is_left(copied: CopiedChain) -> None:
    copied.damage({copied.base("s1", 1): flip_byte})
    error = refused(copied, use_backup_copies=False)
    assert error.details["lost"] == [{"shard": "s1", "what": "public.first", "partitions": 1}]
    assert "--use-backup-copies" in error.hint
    assert error.details["restorable"] == [0]


def test_one_copy_that_is_altered_and_another_that_is_gone_are_named_once(copied: CopiedChain) -> None:
    """The verification has said already what is lost; an error that was its own cause would have no end."""
    copied.damage({copied.base("s1", 1): flip_byte, copied.base("s1-b1", 1): remove})
    error = refused(copied)
    assert error.details["lost"] == [{"shard": "s1", "what": "public.first", "partitions": 1}]
    assert error.__cause__ is not error


def test_damage_of_tables_that_are_not_restored_does_not_matter(copied: CopiedChain) -> None:
    copied.damage({copied.base("s1", 1): remove, copied.base("s1-b1", 1): remove})
    report = restore(copied, use_backup_copies=False, groups=("public.item", "public.log"))
    assert report.borrowed == ()
    for restored, truth in zip(copied.restored(), copied.truth[2], strict=True):
        assert {name: rows for name, rows in restored.items() if rows} == {
            name: truth[name] for name in ("public.item", "public.log")
        }


def test_ddl_has_one_copy_only(copied: CopiedChain) -> None:
    key = find_ddl(copied.chain, "s2").key
    copied.damage({key: flip_byte})
    error = refused(copied)
    assert error.details["lost"] == [{"shard": "s2", "what": "DDL", "partitions": None}]
    # Increment 1 has DDL of its own.
    assert error.details["restorable"] == [0, 1]


def test_a_resumed_restore_takes_the_same_rows_from_the_same_copies(copied: CopiedChain) -> None:
    """The object is put back meanwhile: loaded from it as well, every row would be there twice."""
    key = copied.base("s1", 1)
    whole = (copied.store / key).read_bytes()
    copied.damage({key: flip_byte})

    def then(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.ROWS_LOADED:
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    request = RestoreRequest(NAME, use_backup_copies=True)
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(copied.fleet, copied.target, request), copied.spark, Watching(then))
    (copied.store / key).write_bytes(whole)
    report = resume_restore(copied.fleet, copied.target, RestoreRequest(NAME), copied.spark, Silent())
    assert borrowed(report) == {("s1", "s1-b1"): {"public.first"}}
    assert copied.restored() == copied.truth[2]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_restore_that_lacks_only_its_outcome_reports_what_its_record_has(
    copied: CopiedChain, *, is_gone: bool
) -> None:
    copied.damage({copied.base("s1", 1): flip_byte})

    def then(reached: Reached) -> None:
        if reached.point == RestoreCrashPoint.SLOTS_RELEASED:
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    move = TableMove("public", "first", "other", "one")
    request = RestoreRequest(NAME, use_backup_copies=True, scope=RestoreScope(moves=(move,)))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(copied.fleet, copied.target, request), copied.spark, Watching(then))
    if is_gone:
        remove(copied.store / "snapshots" / NAME / "snapshot.json")
    report = resume_restore(copied.fleet, copied.target, RestoreRequest(NAME), copied.spark, Silent())
    assert report.moved == [f"{node}: public.first=other.one" for node in ("s1", "s2")]
    assert [(one.node, one.rows) for one in report.nodes] == [("s1", 100), ("s2", 100)]
    if is_gone:
        (warning,) = report.warnings
        assert "from the copy of s1-b1" in warning
    else:
        assert borrowed(report) == {("s1", "s1-b1"): {"public.first"}}
        assert report.bytes > 0


def test_the_command_says_what_it_would_take_and_what_it_took(copied: CopiedChain) -> None:
    key = copied.base("s1", 1)
    copied.damage({key: remove})
    to = [NAME, "--to", str(copied.target.path)]
    code, document = run_here(copied.fleet, "restore", *to, "--dry-run")
    assert (code, document["error"], document["details"]["object"]) == (3, "object-damaged", key)
    taken = [{"shard": "s1", "node": "s1-b1", "groups": ["public.first"]}]
    damaged = [{"object": key, "node": "s1", "kind": "missing"}]
    code, document = run_here(copied.fleet, "restore", *to, "--dry-run", "--use-backup-copies")
    assert (code, document["from_backup_copies"], document["damaged"]) == (0, taken, damaged)
    code, text = run_and_capture(copied.fleet, "restore", *to, "--dry-run", "--use-backup-copies")
    assert code == 0
    assert "not read: the objects;" in text
    assert "every other check passed; nothing was changed" in text
    assert copied.databases() == set()
    code, text = run_and_capture(copied.fleet, "restore", *to, "--use-backup-copies", spark=copied.spark.running)
    assert code == 0
    assert f"damaged: object {key} of node s1: it is not in the store" in text
    # The plan says so before the work; the report does not repeat it.
    assert text.count("to take from the copy of s1-b1 for s1: public.first") == 1
    assert copied.databases() == {DATABASE}
    assert copied.restored() == copied.truth[2]


def test_every_pattern_of_a_group_has_to_match(copied: CopiedChain) -> None:
    request = RestoreRequest(NAME, groups=("public.item", "public.itme", "nowhere.*", "public.l*"))
    with pytest.raises(UsageError, match=r"no table with rows in \w+ \w+ matches public\.itme, nowhere\.\*$"):
        plan_restore(copied.fleet, copied.target, request)
    with pytest.raises(UsageError) as raised:
        plan_restore(copied.fleet, copied.target, RestoreRequest(NAME, groups=("Public.Item", "public.lo")))
    other_case, partitions, _ = raised.value.hint.splitlines()
    assert other_case == "same name in other case: public.item   (patterns are case-sensitive)"
    assert partitions.endswith("tables that begin with public.lo: public.log")
    alone = plan_restore(copied.fleet, copied.target, structs.replace(request, groups=("public.item", "public.l*")))
    names = {group.name for groups in alone.groups.values() for group in request.tables.of(groups)}
    assert names == {"public.item", "public.log"}
