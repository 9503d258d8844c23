"""A hint's commands that end a restore name the target that was given, each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.cli.commands.restore_ends import name_target

TO = Path("dr.toml")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("to undo it: snapshot restore-abandon daily", "to undo it: snapshot restore-abandon daily --to dr.toml"),
        (
            "undo the restore: snapshot restore-abandon daily; then run: snapshot check",
            "undo the restore: snapshot restore-abandon daily --to dr.toml; then run: snapshot check",
        ),
        (
            "to finish it: snapshot restore-resume daily   to undo it: snapshot restore-abandon daily   (as before)",
            "to finish it: snapshot restore-resume daily --to dr.toml   to undo it: snapshot restore-abandon daily"
            " --to dr.toml   (as before)",
        ),
        (
            "snapshot restore-resume one; or snapshot restore-abandon two",
            "snapshot restore-resume one --to dr.toml; or snapshot restore-abandon two --to dr.toml",
        ),
        ("snapshot restore-resume daily --to a.toml --node s1", "snapshot restore-resume daily --to a.toml --node s1"),
        ("to drop it: snapshot restore-discard", "to drop it: snapshot restore-discard --to dr.toml"),
        ("snapshot drill daily", "snapshot drill daily --to dr.toml"),
        (
            "snapshot restore daily --role-map 'a; b=c'\"'\"'d'; then: snapshot list",
            "snapshot restore daily --role-map 'a; b=c'\"'\"'d' --to dr.toml; then: snapshot list",
        ),
        ("run: snapshot check", "run: snapshot check"),
    ],
)
def test_every_command_names_it_once(line: str, named: str) -> None:
    assert name_target(line, TO) == named
    assert name_target(line, None) == line
