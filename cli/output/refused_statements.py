"""The statements that a target refused, left in a file for an operator to correct and to run with psql."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from cli.folders.whole_file import replaced_file
from fleet.nodes.encodings import RAW
from restore.ddl.statements import is_statements_alone
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
# Until the last \unrestrict psql takes no command from the statements, whatever these make of quotes: it follows the
# session's settings, and puts the text of its variables among them. One that does not know \restrict ends there. So it
# does without the session: what it is to do on errors counts from the statements on.
BEGIN = """\
\\set given :ON_ERROR_STOP
\\set ON_ERROR_STOP on
\\restrict {token}
\\unrestrict {token}
{connect}
\\set ON_ERROR_STOP :given
\\unset given
\\restrict {token}
"""
AS_ANOTHER = "-- To run them as another role, such as a superuser, change user in the next line."
END = "\\unrestrict {token}\n"
NOT_SQL = (
    "-- Left out: it has more than whole statements of SQL, and psql would run commands or take what follows for a part"
    " of it. Somebody changed the store, or another pg_dump wrote it: see: snapshot check"
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
    # Nobody who writes to a store knows it.
    token = secrets.token_hex()
    lines = [] if is_published else [UNFINISHED]
    for (node, database, access), statements in groupby(refused, lambda one: (one.node, one.database, one.access)):
        lines += [f"-- node {_comment(node)}, database {_comment(database)}", _connect(access, token), SETTINGS]
        for one in statements:
            text = one.script if is_statements_alone(one.script) else NOT_SQL
            lines += [f"-- {_comment(one.object)}: {_comment(one.reason)}", f"{one.settings}{text}"]
        lines.append(END.format(token=token))
    try:
        with replaced_file(path, FILE_MODE) as write:
            write("\n".join(lines))
    except UsageError as error:
        return None, f"the refused statements can't be written to a file: {error.message}"
    line = f"the refused statements are in {path}"
    if is_published and refused:
        command = ["psql", "--set=ON_ERROR_STOP=1", f"--file={path}", refused[0].access]
        line += f"; correct them, then run: {shlex.join(command)}"
    return str(path), line


def _connect(access: str, token: str) -> str:
    """The lines that have psql run what follows in this database, and nowhere else."""
    if len(access.splitlines()) > 1:
        line = (
            f"-- psql can't be told a name with line ends: connect to the database, and delete the next line.\n{QUIT}"
        )
    else:
        quoted = access.replace('"', '""')
        line = f'{AS_ANOTHER}\n\\connect -reuse-previous=off "{quoted}"'
    return BEGIN.format(connect=line, token=token)


def _comment(text: str) -> str:
    """The text as part of a comment's line."""
    return " ".join(text.split())
