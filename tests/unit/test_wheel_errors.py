"""What a client program of PostgreSQL says when it fails: its error is shown, whatever follows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.nodes.programs import ProgramFailedError, run_tool


def failing(folder: Path, said: str) -> None:
    program = folder / "pg_dump"
    program.write_text(f"#!/bin/sh\n[ \"$LC_ALL\" = C ] || exit 9\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "pg_dump: warning: old\npg_dump: error: query failed: ERROR:  no right\nCONTEXT:  f\nLINE 1: a\n\nb\nc\nd",
            "pg_dump: error: query failed: ERROR:  no right / CONTEXT:  f / LINE 1: a",
        ),
        ("a\nERROR:  no right\nCONTEXT:  f", "ERROR:  no right / CONTEXT:  f"),
        ("a\nb\nc\nd", "b / c / d"),
    ],
)
def test_the_error_of_a_program_is_never_lost_in_what_follows(tmp_path: Path, said: str, shown: str) -> None:
    failing(tmp_path, said)
    with pytest.raises(ProgramFailedError) as raised:
        run_tool("pg_dump", folder=tmp_path)
    assert raised.value.message == f"pg_dump exited with code 1: {shown}"
    assert raised.value.details["said"] == said.splitlines()
