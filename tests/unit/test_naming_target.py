"""A hint's commands that end a restore name the target that was given, each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.cli.commands.restore_ends import name_target

TO = Path("dr.toml")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("to undo it: snapshot restore daily --abandon", "to undo it: snapshot restore daily --abandon --to dr.toml"),
        (
            "undo the restore: snapshot restore daily --abandon; and run: snapshot check",
            "undo the restore: snapshot restore daily --abandon --to dr.toml; and run: snapshot check",
        ),
        (
            "to end it: snapshot restore daily --resume   or: --abandon",
            "to end it: snapshot restore daily --resume --to dr.toml   or: --abandon",
        ),
        (
            "snapshot restore one --resume; or snapshot restore two --abandon",
            "snapshot restore one --resume --to dr.toml; or snapshot restore two --abandon --to dr.toml",
        ),
        ("snapshot restore daily --to other.toml --resume", "snapshot restore daily --to other.toml --resume"),
        ("snapshot restore daily --drill", "snapshot restore daily --drill --to dr.toml"),
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
