"""The statements that a target refused, left in a file for an operator to mend and run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from cli.folders.whole_file import replaced_file
from fleet.nodes.encodings import RAW
from restore.report import RefusedStatement
from storage.errors import UsageError

# The options of a user mapping may be a password.
FILE_MODE = 0o600
# The statements are the server's own bytes, whatever the database's encoding, and qualify names as a dump does.
SETTINGS = f"""\
SET client_encoding = '{RAW}';
SET standard_conforming_strings = on;
SET check_function_bodies = off;
SET search_path = '';
"""


def write_refused(operation: str, refused: Iterable[RefusedStatement], folder: Path) -> tuple[str | None, str]:
    """Write the statements to a file in `folder`; return its path, None if it can't be written, and a line about it."""
    path = folder / f"{operation}-refused.sql"
    lines: list[str] = []
    for (node, database), statements in groupby(refused, key=lambda one: (one.node, one.database)):
        lines += [f"-- node {_comment(node)}, database {_comment(database)}", SETTINGS]
        for one in statements:
            reason = one.reason or "refused by an earlier process of the restore, which has the statement"
            lines += [f"-- {_comment(one.object)}: {_comment(reason)}", one.script]
    try:
        with replaced_file(path, FILE_MODE) as write:
            write("\n".join(lines))
    except UsageError as error:
        return None, f"the refused statements can't be written to a file: {error.message}"
    return str(path), f"the refused statements are in {path}"


def _comment(text: str) -> str:
    """The text as part of a comment's line."""
    return " ".join(text.split())
