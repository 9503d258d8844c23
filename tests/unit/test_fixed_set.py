"""`make test` has a test of every module and a case of every kind of fault; with `make rest` it has every test once."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from cutline.restore.targets.databases import RestoreCrashPoint
from tests.faults.cases import FAULTS, KINDS, Case, all_steps
from tests.run.selection import FIXED, LEFT_OUT, is_named, read_fixed_set
from tests.run.soak import covering, first, first_of_each

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))
LONG_FORMS = re.findall(r"(?m)^(?:SAMPLED :=|soak:|fuzz:).*\n(?:[ \t].*\n)*", (ROOT / "Makefile").read_text())
COLLECT_SECONDS_MAX = 280
FAULT_WALK = "tests/integration/test_fault_walk.py::test_after_a_fault_the_next_command_continues"
RESTORE_WALK = "tests/integration/restoring/test_restore_walk.py::test_a_killed_restore_ends_whole"
# Each has one test of a minute or more, or several that share a history as long.
LEFT_TO_REST = {
    "tests/fuzz/test_database.py",
    "tests/integration/damage/test_backup_copies.py",
    "tests/integration/damage/test_damage_routed.py",
    "tests/integration/damage/test_lost_lists.py",
    "tests/integration/drill/test_drilled_tablespaces.py",
    "tests/integration/drill/test_existing_roles.py",
    "tests/integration/drill/test_new_databases.py",
    "tests/integration/drill/test_programs.py",
    "tests/integration/exact/test_odd_tables.py",
    "tests/integration/matrix/test_dependencies_matrix.py",
    "tests/integration/matrix/test_matrix.py",
    "tests/integration/recovering/test_recovery_plan.py",
    "tests/integration/restoring/test_beside_others.py",
    "tests/integration/restoring/test_cancelled_restores.py",
    "tests/integration/restoring/test_data_only.py",
    "tests/integration/restoring/test_data_only_changed.py",
    "tests/integration/restoring/test_data_only_ends.py",
    "tests/integration/restoring/test_data_only_guarded.py",
    "tests/integration/restoring/test_data_only_obstacles.py",
    "tests/integration/restoring/test_data_only_others.py",
    "tests/integration/restoring/test_frozen_rows.py",
    "tests/integration/restoring/test_lost_fillings.py",
    "tests/integration/restoring/test_lost_records.py",
    "tests/integration/restoring/test_progress.py",
    "tests/integration/restoring/test_refused_ends.py",
    "tests/integration/restoring/test_resumed_plan.py",
    "tests/integration/restoring/test_stalled_ends.py",
    "tests/integration/restoring/test_unfinished.py",
    "tests/integration/routing/test_routed.py",
    "tests/integration/routing/test_routing_refused.py",
    "tests/integration/test_cluster_page.py",
    "tests/integration/test_copied_merges.py",
    "tests/integration/test_cut_times.py",
    "tests/integration/test_damage_matrix.py",
    "tests/integration/test_database_settings.py",
    "tests/integration/test_drain_killed.py",
    "tests/integration/test_drain_sizes.py",
    "tests/integration/test_executors.py",
    "tests/integration/test_extensions.py",
    "tests/integration/test_failover_slots.py",
    "tests/integration/test_half_fleets.py",
    "tests/integration/test_held_archives.py",
    "tests/integration/test_hooks.py",
    "tests/integration/test_large_commits.py",
    "tests/integration/test_live_repair.py",
    "tests/integration/test_lock_lost.py",
    "tests/integration/test_lost_commits.py",
    "tests/integration/test_main_job.py",
    "tests/integration/test_many_tables.py",
    "tests/integration/test_merged_renewals.py",
    "tests/integration/test_money.py",
    "tests/integration/test_mutations.py",
    "tests/integration/test_oldest_server.py",
    "tests/integration/test_participants.py",
    "tests/integration/test_pgbench.py",
    "tests/integration/test_policies.py",
    "tests/integration/test_repaired_merges.py",
    "tests/integration/test_restoring_role.py",
    "tests/integration/test_secrets.py",
    "tests/integration/test_server_globals.py",
    "tests/integration/test_since_last.py",
    "tests/integration/test_speculation.py",
    "tests/integration/test_store_outages.py",
    "tests/integration/test_tls_clients.py",
    "tests/integration/test_upgraded_shard.py",
    "tests/integration/test_value_memory.py",
    "tests/integration/test_watch.py",
    "tests/integration/test_wrong_clocks.py",
    "tests/spark/test_executors_volume.py",
    "tests/spark/test_killed_executors.py",
    "tests/spark/test_session_files.py",
}


def named(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


@cache
def collected(cases: str) -> frozenset[str]:
    """The tests of a whole run."""
    options = ["--collect-only", "-q", "--cases", cases, "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=importlib", *options], cwd=ROOT, capture_output=True, text=True,
        timeout=COLLECT_SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return frozenset(line for line in done.stdout.splitlines() if "::" in line)


@pytest.fixture(scope="module")
def in_test() -> frozenset[str]:
    return collected("test")


@pytest.mark.long
@pytest.mark.rest
@pytest.mark.timeout(COLLECT_SECONDS_MAX * 2)
def test_no_test_is_in_both_the_fixed_set_and_the_rest(in_test: frozenset[str]) -> None:
    rest = collected("rest")
    assert in_test
    assert rest
    assert not in_test & rest


@pytest.mark.long
def test_every_module_has_a_test_in_it(in_test: frozenset[str]) -> None:
    modules = {test.partition("::")[0] for test in in_test}
    assert {named(module) for module in MODULES} - modules == LEFT_TO_REST


@pytest.mark.long
def test_every_name_of_the_table_is_a_test_of_it(in_test: frozenset[str]) -> None:
    known = {*in_test, *(test.partition("[")[0] for test in in_test)}
    listed = {f"{module}::{name}" for module, names in FIXED.items() for name in names if not name.startswith(LEFT_OUT)}
    assert listed - known == set()


@pytest.mark.long
@pytest.mark.rest
def test_every_name_that_is_left_out_is_a_test_of_the_rest() -> None:
    rest = collected("rest")
    known = {*rest, *(test.partition("[")[0] for test in rest)}
    names = {module: {name for name in names if name.startswith(LEFT_OUT)} for module, names in FIXED.items()}
    assert {f"{module}::{name.removeprefix(LEFT_OUT)}" for module in names for name in names[module]} - known == set()
    # The lines of a module either all begin with a minus, or none does.
    assert [module for module, left_out in names.items() if left_out and left_out != FIXED[module]] == []


@pytest.mark.long
def test_every_fault_and_every_kind_of_crash_point_is_in_it(in_test: frozenset[str]) -> None:
    walked = {test.removeprefix(f"{FAULT_WALK}[").removesuffix("]") for test in in_test if test.startswith(FAULT_WALK)}
    assert {case.partition("-")[0] for case in walked} >= {
        Case(all_steps()[0], fault).name.partition("-")[0] for fault in FAULTS
    }
    for kind, points in KINDS.items():
        assert any(point.replace(" ", "_") in case for point in points for case in walked), kind
    killed = {test.removeprefix(f"{RESTORE_WALK}[") for test in in_test if test.startswith(RESTORE_WALK)}
    points = [
        point for point in RestoreCrashPoint if any(case.startswith(f"{point.replace(' ', '-')}-") for case in killed)
    ]
    order = [*RestoreCrashPoint]
    assert {order.index(point) < order.index(RestoreCrashPoint.DECIDED) for point in points} == {False, True}


@pytest.mark.long
@pytest.mark.rest
def test_every_crash_point_has_a_fault_in_one_of_both(in_test: frozenset[str]) -> None:
    walked = [test for test in in_test | collected("rest") if test.startswith(FAULT_WALK)]
    for step in all_steps():
        assert any(test.endswith(f"-{step}]") for test in walked), step


def test_a_table_has_its_modules_and_their_tests() -> None:
    text = "# why\n\na.py\n    test_one\n    test_two[x y]\n\nb.py\n\nc.py\n    - test_three\n"
    assert read_fixed_set(text) == {"a.py": {"test_one", "test_two[x y]"}, "b.py": set(), "c.py": {"- test_three"}}


def test_a_module_has_the_tests_that_are_listed_or_all_but_those_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FIXED, "a.py", {"test_one", "test_two[x y]"})
    monkeypatch.setitem(FIXED, "c.py", {"- test_three", "- test_four[x]"})
    chosen = ["a.py::test_one[z]", "a.py::test_two[x y]", "b.py::test_one", "c.py::test_one", "c.py::test_four[z]"]
    others = ["a.py::test_two[z]", "a.py::test_three", "c.py::test_three[z]", "c.py::test_four[x]"]
    assert [is_named(nodeid) for nodeid in (*chosen, *others)] == [True] * len(chosen) + [False] * len(others)


def test_the_first_cases_have_no_mark() -> None:
    cases = first(["a", ("b", 1), pytest.param("c", id="other")], 2)
    assert [(case.values, case.id, [mark.name for mark in case.marks]) for case in cases] == [
        (("a",), None, []),
        (("b", 1), None, []),
        (("c",), "other", ["rest"]),
    ]


def test_of_a_product_the_diagonal_has_every_value() -> None:
    pairs = [(number, letter) for number in range(3) for letter in "abcde"]
    assert [pairs[number] for number in sorted(covering(pairs))] == [(0, "a"), (0, "d"), (0, "e"), (1, "b"), (2, "c")]
    assert [case.values for case in first_of_each(pairs) if not case.marks] == [
        pairs[number] for number in sorted(covering(pairs))
    ]


def test_what_has_a_long_form_is_in_one() -> None:
    words = set(re.split(r"[\s,)]+", "".join(LONG_FORMS)))
    folders = {word for word in words if word.startswith("tests/")}
    for module in MODULES:
        if re.search(r"from tests\.run\.soak import .*\bSOAK_SECONDS\b", module.read_text()):
            assert {named(one) for one in (module, *module.parents[:-1]) if one.is_relative_to(ROOT)} & folders or (
                module.name in words
            ), module
