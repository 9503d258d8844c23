"""Every command that a message recommends exists, with the options and arguments in the message."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cutline.cli.main import COMMANDS, app
from cutline.cli.output.failure import _USAGE_MISTAKE, CommandFailure, naming_fleet
from cutline.fleet.messages import NEW_CHAIN

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("cli", "embedded", "restore", "check", "snapshots", "wal", "fleet", "storage")
# A command follows one of these, or begins a hint; in "the snapshot was deleted" there is none.
LEAD = r"(?:: |; |\(| {3}|then |or |as )"
WORDS = r"snapshot((?: (?:--[a-z-]+|[a-z-]+|[A-Z]+|x|\d+(?:/\d+)?)(?=[\s;,.)]|$))+)"
HINTS = {"hint", "remedy", "NEW_CHAIN"}


@cache
def texts_of(path: Path) -> tuple[tuple[int, str, bool], ...]:
    """Every string of a module except docstrings, its line, and whether it is a hint; inserted values read `x`."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    left_out = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    left_out |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    hints = {id(part) for node in nodes if is_hint(node) for part in ast.walk(node)}
    found: list[tuple[int, str, bool]] = []
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            found.append((node.lineno, node.value, id(node) in hints))
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values)
            found.append((node.lineno, text, id(node) in hints))
    return tuple(found)


def is_hint(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id in HINTS for target in node.targets)
    return isinstance(node, ast.keyword) and node.arg in HINTS


def commands_in(text: str, *, is_hint: bool) -> list[list[str]]:
    lead = f"(?:^|{LEAD})" if is_hint else LEAD
    # If the text continues after a command, three spaces end the command.
    return [found.split() for found in re.findall(lead + WORDS, text)]


@cache
def found_commands() -> dict[str, list[str]]:
    """Every command in a message of the product, by its file and line."""
    return {
        f"{path.relative_to(ROOT)}:{line} {words}": words
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text, is_hint in texts_of(path)
        for words in commands_in(text, is_hint=is_hint)
    }


@cache
def program() -> Any:
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Parse a command line as the program does, without running it; a mistake raises the program's own error."""
    command = program()
    context, name = None, "snapshot"
    while True:
        numbered = [
            "1" if word == "N" or before in ("--increment", "--to") else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        context = command.make_context(name, numbered, parent=context)
        command = context.command
        if not hasattr(command, "resolve_command"):
            return
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def test_every_command_in_a_message_can_be_typed() -> None:
    refused: dict[str, str] = {}
    for place, words in found_commands().items():
        try:
            parse(words)
        except _USAGE_MISTAKE as error:
            refused[place] = str(error)
    assert refused == {}


def test_the_commands_are_found() -> None:
    assert commands_in(NEW_CHAIN, is_hint=True) == [["init"], ["create", "NAME"]]
    assert commands_in("the snapshot was deleted and taken anew by hand", is_hint=True) == []
    assert commands_in("next: snapshot create x --incremental; or not", is_hint=True) == [
        ["create", "x", "--incremental"]
    ]
    assert commands_in("snapshot check NAME --subset 1/7", is_hint=True) == [["check", "NAME", "--subset", "1/7"]]
    assert len(found_commands()) > 20


def test_no_hint_leaves_the_name_of_the_program_out() -> None:
    bare = re.compile(rf"(?<!snapshot )\b(?:{'|'.join(COMMANDS)}) (?:NAME|DIR|--[a-z])")
    assert bare.search("the next one drops them: drill NAME --to FILE")
    found = {
        f"{path.relative_to(ROOT)}:{line} {text}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text, is_hint in texts_of(path)
        if is_hint and bare.search(text)
    }
    assert found == set()


def test_every_command_of_a_hint_names_the_fleet_file_that_was_given() -> None:
    given, hints = "snapshot --fleet 'a b.toml' ", 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for _, text, is_hint in texts_of(path):
                commands = [words for words in commands_in(text, is_hint=True) if words[0] not in ("demo", "--fleet")]
                if not is_hint or "--help" in text or not commands:
                    continue
                named = naming_fleet(CommandFailure(3, "refused", text, text), "a b.toml")
                assert (named.hint.count(given), named.message) == (len(commands), text)
                assert named.hint.replace(given, "snapshot ") == text
                hints += 1
    assert hints > 20
    assert naming_fleet(CommandFailure(3, "refused", "", NEW_CHAIN), None).hint == NEW_CHAIN


@pytest.mark.parametrize("words", ["prune NAME", "create NAME --increment", "create", "demo sideways DIR", "init NAME"])
def test_a_command_that_does_not_exist_is_refused(words: str) -> None:
    with pytest.raises(_USAGE_MISTAKE):
        parse(words.split())
