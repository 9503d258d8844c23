"""The table of kinds of damage: their names, their outcomes, and the page that lists them."""

from __future__ import annotations

from collections import Counter

from tests.damage_matrix import page
from tests.damage_matrix.families import all_kinds
from tests.damage_matrix.kinds import (
    Doubted,
    Drilled,
    Expected,
    Found,
    Hidden,
    Kind,
    Refused,
    Restorable,
    doubted,
    found,
)
from tests.damage_matrix.missed import read_missed
from tests.damage_matrix.sample import fixed_sample
from tests.damage_matrix.trial import Result

KINDS_MIN = 500


def test_every_kind_has_a_name_of_its_own_and_an_outcome() -> None:
    kinds = all_kinds()
    assert len(kinds) >= KINDS_MIN
    assert [name for name, count in Counter(kind.id for kind in kinds).items() if count > 1] == []
    for kind in kinds:
        assert isinstance(kind.expected, Found | Refused) or kind.expected.reason, kind.id
        assert not isinstance(kind.expected, Found | Doubted) or kind.expected.kinds, kind.id


def test_only_what_a_check_should_tell_is_known_to_be_missed() -> None:
    declared = {kind.id: kind.expected for kind in all_kinds()}
    assert [name for name in read_missed() if not isinstance(declared.get(name), Found | Doubted | Restorable)] == []


def test_the_fixed_sample_has_a_kind_of_every_group_of_families_but_none_that_is_missed() -> None:
    sample = fixed_sample(all_kinds(), read_missed())
    groups = {kind.family.partition(":")[0] for kind in all_kinds()}
    assert {kind.family.partition(":")[0] for kind in sample} == groups - {"raw"}
    assert not {kind.id for kind in sample} & read_missed()


def test_the_page_is_current() -> None:
    """`python -m tests.damage_matrix --page` writes it."""
    assert page.PATH.read_text(encoding="utf-8") == page.page_of(all_kinds(), read_missed())


def kind(expected: Expected) -> Kind:
    return Kind("a kind", "family", "pairs", lambda store: None, expected)


def conflict(**fields: str) -> dict[str, object]:
    return dict.fromkeys(("kind", "node", "other_node", "group", "object", "detail"), "") | fields


def result(
    expected: Expected,
    code: int,
    *conflicts: dict[str, object],
    restored: str = "",
    doubts: str = "",
    built: tuple[dict[str, object], ...] = (),
) -> Result:
    of_snapshot = {"conflicts": list(conflicts), "skipped": [], "doubts": [{"kind": doubts}] if doubts else []}
    document = {"snapshots": [of_snapshot]}
    of_built = {"snapshots": [{"conflicts": list(built)}]}
    return Result(kind(expected), code, document, frozenset({"snapshots/daily/x"}), restored, built=of_built)


def test_a_conflict_must_be_of_a_declared_kind_and_at_the_place() -> None:
    expected = found("rows", node="s1", group="public.t")
    assert not result(expected, 1, conflict(kind="rows", node="s1", group="public.t")).problem
    assert not result(expected, 1, conflict(kind="rows", other_node="s1", detail="a row of public.t")).problem
    assert result(expected, 1, conflict(kind="digest", node="s1", group="public.t")).problem
    assert result(expected, 1, conflict(kind="rows", node="s2", group="public.t")).problem
    assert result(expected, 1, conflict(kind="rows", node="s1", group="public.u")).problem
    damaged = found("size", object="(the damaged object)")
    assert not result(damaged, 1, conflict(kind="size", object="snapshots/daily/x")).problem
    assert result(damaged, 1, conflict(kind="size", object="snapshots/daily/y")).problem


def test_only_what_a_check_accepts_is_missed() -> None:
    assert result(found("rows"), 0, restored="the same").is_missed
    assert not result(found("rows"), 4).is_missed
    assert result(found("rows"), 4).problem


def test_what_can_not_be_told_must_be_accepted_and_restored_as_declared() -> None:
    assert not result(Hidden("why", is_same=True), 0, restored="the same").problem
    assert result(Hidden("why", is_same=True), 0, restored="something else").problem
    assert not result(Hidden("why"), 0, restored="something else").problem
    assert result(Hidden("why"), 0, restored="load: refused").problem
    assert "a false alarm" in result(Hidden("why"), 1, conflict(kind="rows")).problem


def test_what_is_doubted_must_be_accepted_with_a_warning() -> None:
    expected = doubted("sequence", reason="why")
    assert not result(expected, 0, restored="something else", doubts="sequence").problem
    assert not result(expected, 0, restored="something else", doubts="sequence").is_missed
    assert result(expected, 0, restored="something else", doubts="time").is_missed
    assert result(expected, 0, restored="the same", doubts="sequence").problem
    assert "a false alarm" in result(expected, 1, conflict(kind="sequence")).problem


def test_what_only_built_rows_tell_must_be_accepted_then_found_and_not_restored() -> None:
    expected = Restorable("why", "s1", "public.t")
    there = conflict(kind="restore", node="s1", group="public.t")
    assert not result(expected, 0, restored="load: refused", built=(there,)).problem
    assert not result(expected, 0, restored="load: refused", built=(there,)).is_missed
    assert result(expected, 0, restored="load: refused").is_missed
    assert result(expected, 0, restored="load: refused", built=(there | {"group": "public.u"},)).problem
    assert result(expected, 0, restored="something else", built=(there,)).problem
    assert result(expected, 1, conflict(kind="rows"), built=(there,)).problem


def test_what_only_a_server_tells_must_be_accepted_and_refused_by_a_restore() -> None:
    assert not result(Drilled("why"), 0, restored="load: refused").problem
    assert result(Drilled("why"), 0, restored="the same").problem
    assert result(Drilled("why"), 0).problem
    assert result(Drilled("why"), 1, conflict(kind="rows")).problem
