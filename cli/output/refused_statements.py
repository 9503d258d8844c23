"""A file of the statements that a target refused, for an operator to correct and run with psql."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from cutline.fleet.own_files import replaced_file
from cutline.nodes.encodings import RAW
from cutline.restore.ddl.statements import is_statements_alone, statements_of
from cutline.restore.plan.report import RefusedStatement
from cutline.storage.errors import UsageError

# The options of a user mapping may include a password.
FILE_MODE = 0o600
# In a script, psql stops at this line.
QUIT = "\\quit"
UNFINISHED = f"""\
-- The restore is unfinished: its databases still have temporary names, and databases with the final names may be those
-- that it will replace. So psql stops here. `snapshot restore-resume` tries the statements again, and with
-- --allow-refused-ddl it rewrites this file.
{QUIT}
"""
# Until the last \unrestrict, psql does not run any psql commands in the statements, however they are quoted. Otherwise
# it could: psql's parser follows the session's settings, and psql substitutes its variables in statements. A psql
# without \restrict stops at the first \restrict, and a psql that can't connect stops at \connect. The caller's
# ON_ERROR_STOP applies only to the statements. The settings for transactions and lines in the caller's ~/.psqlrc
# don't apply: each statement is committed separately.
BEGIN = """\
\\set AUTOCOMMIT on
\\set ON_ERROR_ROLLBACK off
\\set SINGLELINE off
\\set given :ON_ERROR_STOP
\\set ON_ERROR_STOP on
\\restrict {token}
\\unrestrict {token}
{connect}
\\set ON_ERROR_STOP :given
\\unset given
\\restrict {token}
"""
AS_ANOTHER = "-- To run them as another role, such as a superuser, change the user in the next line."
# Where psql sees the end of a constant depends on these two settings, which the statements can change by calling
# functions.
READING = f"SET client_encoding = '{RAW}'; SET standard_conforming_strings = on;\n"
END = f"{READING}\\unrestrict {{token}}\n"
NOT_SQL = (
    "-- Left out: psql might run commands in it, or read the following lines as part of it, because of a backslash"
    " outside of quotes, an unterminated quote or comment, or COPY FROM STDIN. pg_dump never writes such statements,"
    " so compare the definition with the source's"
)
# The statements are the server's own bytes, in the database's encoding, with names qualified as in a dump.
SETTINGS = f"""\
{READING}\
SET check_function_bodies = off;
SET search_path = '';
"""


def write_refused(
    operation: str, refused: Iterable[RefusedStatement], folder: Path, *, is_published: bool
) -> tuple[str | None, str]:
    """Write the statements to a file in `folder`; return its path (None if it can't be written) and a line about it.

    The file is a psql script, which connects to each database before that database's statements, so that no statement
    can run in a different database. Unless the restore `is_published`, the script stops before the statements.
    """
    path, refused = folder / f"{operation}-refused.sql", list(refused)
    # The token must be unknown to anyone who can write to the store.
    token = secrets.token_hex()
    lines = [] if is_published else [UNFINISHED]
    for (node, database, access), statements in groupby(refused, lambda one: (one.node, one.database, one.access)):
        lines += [f"-- node {_comment(node)}, database {_comment(database)}", _connect(access, token), SETTINGS]
        for statement in statements:
            text = _with_reading(statement.script) if is_statements_alone(statement.script) else NOT_SQL
            lines += [
                f"-- {_comment(statement.object)}: {_comment(statement.reason)}",
                f"{_with_reading(statement.settings)}{text}",
            ]
        lines.append(END.format(token=token))
    try:
        with replaced_file(path, FILE_MODE) as write:
            write("\n".join(lines))
    except UsageError as error:
        return None, f"the refused statements can't be written to a file: {error.message}"
    line = f"the refused statements are in {path}"
    if is_published and refused:
        command = ["psql", "--no-psqlrc", "--set=ON_ERROR_STOP=1", f"--file={path}", refused[0].access]
        line += f"; correct them, then run: {shlex.join(command)}"
    return str(path), line


def _connect(access: str, token: str) -> str:
    if len(access.splitlines()) > 1:
        line = (
            "-- \\connect does not accept a name with line breaks: connect to the database yourself, and delete the"
            f" next line.\n{QUIT}"
        )
    else:
        quoted = access.replace('"', '""')
        line = f'{AS_ANOTHER}\n\\connect -reuse-previous=off "{quoted}"'
    return BEGIN.format(connect=line, token=token)


def _with_reading(script: str) -> str:
    """Return the statements, with READING before each statement whose end depends on the settings in READING."""
    texts = (text for text, _ in statements_of(script))
    return "".join(text if text.isascii() and "\\" not in text else _after_gap(text) for text in texts)


def _after_gap(text: str) -> str:
    bare = text.lstrip()
    return f"{text[: len(text) - len(bare)]}{READING}{bare}"


def _comment(text: str) -> str:
    return " ".join(text.split())
