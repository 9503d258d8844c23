"""The pages are correct: every command line in them runs, or at least parses, and prints the output that they show.

The README's tour runs on the fleet that it starts itself, then the other pages' blocks run on the same fleet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.integration.shown_commands import (
    ASSIGNMENT,
    FLEET,
    Shell,
    ShownCommand,
    commands_of,
    difference,
    mentions_of,
    pages,
    parse,
    shell_in,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEARDOWN = "snapshot demo down"
# Shorten the bank's run; NAME becomes the chain that the README's lines for cron begin.
# Beside other tests a full snapshot takes that long, and the page shows changes after it.
CHANGES = {r"--seconds \d+": "--seconds 10", r"\bNAME\b": "week-1"}
SAME_AS_CRON = (
    "the README's lines for cron run the same commands with another template; tests/unit/test_names.py has {date}"
)
COPIES = "the tour has no second store; tests/integration/test_copying.py copies, and restores from a copy"
PINS = "the tour has no such increment; tests/integration/test_keep.py pins one"
ONE_TABLE = "the tour keeps its tables; tests/integration/parts/test_schemas.py restores a table in both ways"
# Command lines in code blocks that are only parsed, and why. Those in sentences show no output and are only parsed.
NOT_RUN = {
    "snapshot create large": "nobody interrupts it; tests/integration/test_resumed_full.py interrupts and resumes",
    "snapshot copy --all": COPIES,
    "snapshot copy nightly": COPIES,
    "snapshot --fleet second.toml check": COPIES,
    "snapshot --fleet second.toml drill nightly": COPIES,
    "snapshot --fleet second.toml list": COPIES,
    "snapshot --fleet second.toml show nightly --statements": COPIES,
    "snapshot --fleet second.toml restore nightly --to new-servers.toml --create-roles": COPIES,
    "snapshot restore NAME --group public.account --to scratch.toml": ONE_TABLE,
    "snapshot restore NAME --group public.account --data-only": ONE_TABLE,
    "snapshot repair nightly --from second.toml": COPIES,
    'snapshot keep nightly-07@12 --until 2027-06-30 --reason "audit of 2026"': PINS,
    "snapshot keep nightly-07@12 --release": PINS,
    "snapshot merge nightly --to 2": "later pages show the tour's chain; tests/integration/test_merge.py merges",
    "snapshot key new /etc/cutline/shop.key": "a test writes nothing there; test_encryption.py makes keys",
    "snapshot key new escrow.key": "the tour's store is not encrypted",
    "snapshot key add --key-file escrow.key": "the tour's store is not encrypted",
    "snapshot create 'nightly-{date}' --quiet": SAME_AS_CRON,
    "snapshot create 'nightly-{date}' --incremental --quiet": SAME_AS_CRON,
    "snapshot check 'nightly-{date}' --quiet --junit check.xml": SAME_AS_CRON,
    "snapshot drill 'week-{n}' --quiet --junit drill.xml": "tests/integration/drill runs drills",
    "snapshot drill nightly --to spare.toml --junit drill.xml": "tests/integration/drill runs it",
}
PAGES = pages()


@pytest.fixture(scope="module")
def shell(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Run all pages in order, the README's tour first, and at the end its last command, which stops the fleet."""
    with shell_in(tmp_path_factory.mktemp("tour"), spark, Shell(CHANGES)) as shell:
        teardown = [one for one in commands_of(PAGES[0]) if one.line.startswith(TEARDOWN)]
        for page in PAGES:
            run_all(shell, [one for one in commands_of(page) if one not in teardown])
        run_all(shell, teardown)
        yield shell


def run_all(shell: Shell, commands: list[ShownCommand]) -> None:
    for command in commands:
        if "new-fleet.toml" in command.line:
            write_target()
        if command.line not in NOT_RUN:
            shell.run_shown(command)


def write_target() -> None:
    """Describe another fleet to restore into: other databases of the same servers."""
    text = (FLEET / "fleet.toml").read_text()
    moved = re.sub(r"/bank\b", "/moved", text)
    assert moved != text
    Path("new-fleet.toml").write_text(moved)


def test_the_pages_show_commands() -> None:
    assert len(commands_of(PAGES[0])) > 10
    assert any(one.output for one in commands_of(PAGES[0]))
    assert len([one for page in PAGES for one in mentions_of(page)]) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_line_parses(page: Path) -> None:
    for command in [*commands_of(page), *mentions_of(page)]:
        if command.line.startswith("snapshot") or ASSIGNMENT.fullmatch(command.line):
            try:
                parse(command)
            except Exception as error:
                raise AssertionError(f"{command.line}: {error}") from error


def test_every_command_line_of_a_block_runs(shell: Shell) -> None:
    shown = {one for page in PAGES for one in commands_of(page)}
    assert {one.line for one in shown - shell.outputs.keys()} == set(NOT_RUN)


@pytest.mark.parametrize(
    "command",
    [one for page in PAGES for one in commands_of(page) if one.output is not None and one.line not in NOT_RUN],
    ids=lambda one: one.line,
)
def test_the_output_matches_the_page(shell: Shell, command: ShownCommand) -> None:
    # In full: pytest would cut it off.
    if text := difference(command.output or (), shell.outputs[command]):
        pytest.fail(text)
