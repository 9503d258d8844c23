"""The statements that a target refused, left in a file for an operator to correct and to run with psql."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from cli.folders.whole_file import replaced_file
from fleet.nodes.encodings import RAW
from restore.ddl.statements import has_commands_of_psql
from restore.report import RefusedStatement
from storage.errors import UsageError

# The options of a user mapping may be a password.
FILE_MODE = 0o600
# In a script psql ends at the line.
QUIT = "\\quit"
UNFINISHED = f"""\
-- The restore has not ended: its databases have other names, and what has their names may be what it replaces. So
-- psql ends here; --resume tries the statements again, and --resume --allow-refused-ddl writes the file anew.
{QUIT}
"""
# Whatever psql is to do on errors: without the session it runs nothing more.
BEGIN = """\
\\set given :ON_ERROR_STOP
\\set ON_ERROR_STOP on
{connect}
\\set ON_ERROR_STOP :given
\\unset given
"""
NOT_SQL = (
    "-- Left out: it has a backslash outside of quotes, by which psql runs commands. Somebody changed the store, or"
    " another pg_dump wrote it: see: snapshot check"
)
# The statements are the server's own bytes, whatever the database's encoding, and qualify names as a dump does.
SETTINGS = f"""\
SET client_encoding = '{RAW}';
SET standard_conforming_strings = on;
SET check_function_bodies = off;
SET search_path = '';
"""


def write_refused(
    operation: str, refused: Iterable[RefusedStatement], folder: Path, *, is_published: bool
) -> tuple[str | None, str]:
    """Write the statements to a file in `folder`; return its path, None if it can't be written, and a line about it.

    It is a script for psql, which connects to each database before its statements: none can run in another one. Unless
    the restore `is_published` it runs nothing.
    """
    path, refused = folder / f"{operation}-refused.sql", list(refused)
    lines = [] if is_published else [UNFINISHED]
    for (node, database, access), statements in groupby(refused, lambda one: (one.node, one.database, one.access)):
        lines += [f"-- node {_comment(node)}, database {_comment(database)}", _connect(access), SETTINGS]
        for one in statements:
            text = NOT_SQL if has_commands_of_psql(one.script) else one.script
            lines += [f"-- {_comment(one.object)}: {_comment(one.reason)}", text]
    try:
        with replaced_file(path, FILE_MODE) as write:
            write("\n".join(lines))
    except UsageError as error:
        return None, f"the refused statements can't be written to a file: {error.message}"
    line = f"the refused statements are in {path}"
    if is_published and refused:
        line += f"; correct them, then run: {shlex.join(['psql', f'--file={path}', refused[0].access])}"
    return str(path), line


def _connect(access: str) -> str:
    """The lines that have psql run what follows in this database, and nowhere else."""
    if len(access.splitlines()) > 1:
        return (
            f"-- psql can't be told a name with line ends: connect to the database, and delete the next line.\n{QUIT}\n"
        )
    quoted = access.replace('"', '""')
    return BEGIN.format(connect=f'\\connect -reuse-previous=off "{quoted}"')


def _comment(text: str) -> str:
    """The text as part of a comment's line."""
    return " ".join(text.split())
