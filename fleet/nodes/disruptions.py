"""Errors of a server that say nothing about the statement that they end: it lacked room, or others were in the way.

The same statement succeeds later. So it was not refused, and nothing must be done without it.
"""

from __future__ import annotations

import psycopg

# What to do, by what an SQLSTATE begins with (PostgreSQL manual, "PostgreSQL Error Codes"). Of class 58 only I/O
# errors: others name a file that is not there, such as a function's library. A shutdown (57P) loses the session.
REMEDIES = {
    "53100": "make room on the server's disk, or in /dev/shm if it names a shared memory segment",
    "53200": "give the server more memory, or raise the setting that it names",
    "53": "give the server more of what it names",
    "57014": "somebody cancelled the statement on the server: see who",
    "58030": "see the server's log: its disk or file system has a fault",
    "40001": "see who else uses the database",
    "40P01": "see who else uses the database",
    "55P03": "see who else uses the database",
}


def remedy_of(error: psycopg.Error) -> str:
    """What to do before the statement is repeated; "" if the error is about the statement itself."""
    state = error.diag.sqlstate or ""
    return next((remedy for begin, remedy in REMEDIES.items() if state.startswith(begin)), "")
