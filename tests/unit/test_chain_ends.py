"""Whoever raises an error whose hint begins a new chain says by `ends_chain` whether the chain has ended.

`watch` reads only that, so the hint may be worded otherwise. Here the source is compared: every use of NEW_CHAIN.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.fleet.progress import Silent
from cutline.nodes.groups import SchemaChangedError
from cutline.snapshots.ddl.attempts import ChangedError, retry_until_unchanged
from cutline.storage.errors import ERRORS, ChainEnd, ReportedError, error_of, report_of
from cutline.wal.drain.slots import SlotLostError

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("cli", "restore", "check", "snapshots", "spark", "wal", "nodes", "fleet", "storage")
# Where it is a line of a report, and no error's hint.
NO_ERRORS = {"fleet/messages.py", "cli/output/restore_report.py"}


def has_name(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def uses_in(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "NEW_CHAIN" for node in ast.walk(tree))


def begins_with_it(hint: ast.expr) -> bool:
    if isinstance(hint, ast.JoinedStr):
        first = hint.values[0]
        return isinstance(first, ast.FormattedValue) and begins_with_it(first.value)
    return isinstance(hint, ast.Name) and hint.id == "NEW_CHAIN"


def complaints_about(source: str) -> Iterator[str]:
    """What is wrong with the raisers in this source."""
    tree = ast.parse(source)
    counted = 0
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        texts = [one for one in assigned if has_name(one.value, {"NEW_CHAIN"})]
        names = {one.id for text in texts for one in text.targets if isinstance(one, ast.Name)}
        ends = [one.value for one in assigned if has_name(one, {"ends_chain"})]
        is_used = False
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            given = {one.arg: one.value for one in call.keywords}
            hint, said = given.get("hint"), given.get("ends_chain")
            if hint is None or not has_name(hint, {"NEW_CHAIN", *names}):
                if said is not None and not (isinstance(said, ast.Name) and names):
                    yield f"line {call.lineno}: ends_chain without NEW_CHAIN in the hint"
                continue
            counted += uses_in(hint)
            is_used = is_used or has_name(hint, names)
            expected = "ChainEnd.FOR_GOOD" if begins_with_it(hint) else "ChainEnd.PERHAPS"
            # A variable beside that of the hint has the value where the hint has it.
            found = {ast.unparse(one) for one in (ends if isinstance(said, ast.Name) else [said] if said else [])}
            if found - {"ChainEnd.NO"} != {expected}:
                yield f"line {call.lineno}: ends_chain is {sorted(found)}, by its hint it is {expected}"
        counted += sum(map(uses_in, texts)) if is_used else 0
    if counted != uses_in(tree):
        yield f"{uses_in(tree) - counted} uses of NEW_CHAIN are in no hint of an error"


def test_every_error_whose_hint_begins_a_new_chain_says_whether_it_ends_the_chain() -> None:
    found, uses = [], 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
            if name in NO_ERRORS or not any(word in source for word in ("NEW_CHAIN", "ends_chain")):
                continue
            uses += uses_in(ast.parse(source))
            found += [f"{name}: {one}" for one in complaints_about(source)]
    assert found == []
    assert uses > 15


@pytest.mark.parametrize(
    "hint",
    [
        "hint=NEW_CHAIN",
        "hint=NEW_CHAIN, ends_chain=ChainEnd.PERHAPS",
        "hint=f'{NEW_CHAIN}   (or not)', ends_chain=ChainEnd.NO",
        "hint=f'put it back, or {NEW_CHAIN}', ends_chain=ChainEnd.FOR_GOOD",
        "hint='repeat it', ends_chain=ChainEnd.PERHAPS",
        "remedy=NEW_CHAIN",
    ],
)
def test_a_raiser_that_says_nothing_or_something_else_is_found(hint: str) -> None:
    assert list(complaints_about(f"def check():\n    raise SlotLostError('gone', {hint})"))


@pytest.mark.parametrize(("said", "complaints"), [("PERHAPS", 0), ("FOR_GOOD", 1)])
def test_what_a_hint_in_a_variable_says_is_in_a_variable(said: str, complaints: int) -> None:
    source = f"""
def check(is_damaged):
    hint = "repeat it"
    ends_chain = ChainEnd.NO
    if is_damaged:
        hint = f"put it back, or {{NEW_CHAIN}}"
        ends_chain = ChainEnd.{said}
    raise SlotLostError("gone", hint=hint, ends_chain=ends_chain)
"""
    assert len(list(complaints_about(source))) == complaints


@pytest.mark.parametrize("ends_chain", ChainEnd)
def test_it_crosses_a_process_boundary(ends_chain: ChainEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(json.dumps(report_of(SlotLostError("gone", ends_chain=ends_chain))))
    assert error_of(report).ends_chain is ends_chain
    monkeypatch.delitem(ERRORS, "SlotLostError")
    unknown = error_of(report)
    assert isinstance(unknown, ReportedError)
    assert unknown.ends_chain is ends_chain


def test_ddl_ends_no_chain_however_long_it_goes_on() -> None:
    def attempt() -> None:
        raise ChangedError("table public.a was altered")

    with pytest.raises(SchemaChangedError, match="during each of 4 attempts") as refused:
        retry_until_unchanged(attempt, 3, 0.0, Silent())
    assert refused.value.ends_chain is ChainEnd.NO
