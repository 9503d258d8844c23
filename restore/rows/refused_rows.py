"""What to do if a target does not accept rows that the snapshot contains.

COPY reads what COPY has printed, so a table as it is in the snapshot accepts its rows. If it does not, a constraint or
a function of the table is the cause, or the table differs from the snapshot's, or the stored rows are damaged.
"""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from cutline.fleet.messages import CHECK_NAMED, IN_STEPS

SEE_LOG = "check the server's log, then repeat the command"
READS_OTHERS = (
    "a CHECK refuses this row, even after all other rows were loaded that could be: if it reads other rows, which"
    " PostgreSQL does not support, or depends on a setting of a role or session, drop it before the load, and add it"
    " again afterwards"
)
OTHER_PARTITION = (
    "the target puts this row into another partition than the source, as it may if a collation has another version"
    " there: detach the partition before the load; afterwards move such rows, and attach it again"
)
OTHER_KEYS = "if another session has inserted a row with this key, stop it, then repeat the command"
EQUAL_KEYS = (
    "otherwise the snapshot has two rows with this key: drop the index or constraint, load the rows, remove one of the"
    " two, and create it again"
)
WHICH_IS_RIGHT = (
    f"if it is the table's primary key, either the snapshot or the source is damaged; run: {CHECK_NAMED} --restorable"
)
OWN_RULES = "a constraint of the table refuses this row: drop it before the load, and add it again afterwards"
OWN_CODE = "a function that the table calls for each row has failed: correct it, or drop what calls it before the load"
PRIVILEGES = "grant the restoring role what the message names: functions of constraints and generated columns run as it"
NOT_READ = (
    "the table or a type differs from the snapshot's, or the stored row is damaged; to find out whether it is damaged:"
    f" {CHECK_NAMED}"
)
TOO_LARGE = (
    "PostgreSQL stores no row of this size; on the source, rows that are older than a column with a default are stored"
    " without it: drop such columns there, or change types to text or numeric, then take another increment; or restore"
    " an increment from before they were added"
)
OTHERS_IN_STEPS = "to restore all other tables: --schema-only, then --data-only with --group for each of them"
INDEX_LIMIT = "an index of the table can't hold this row: drop it before the load, and create it again afterwards"
# The hints by the first characters of an SQLSTATE (PostgreSQL manual, "PostgreSQL Error Codes"), the longest first.
HINTS: Mapping[str, tuple[str, ...]] = {
    "23505": (OTHER_KEYS, EQUAL_KEYS, WHICH_IS_RIGHT),
    "23P01": (OTHER_KEYS, EQUAL_KEYS),
    "23514": (READS_OTHERS, IN_STEPS),
    "42501": (PRIVILEGES,),
    "23": (OWN_RULES, IN_STEPS),
    "22": (NOT_READ,),
    "54000": (TOO_LARGE, OTHERS_IN_STEPS),
    # Undefined and ambiguous objects, RAISE in PL/pgSQL, and errors of functions in other languages.
    "42": (OWN_CODE, IN_STEPS),
    "P0": (OWN_CODE, IN_STEPS),
    "38": (OWN_CODE, IN_STEPS),
    "39": (OWN_CODE, IN_STEPS),
}
# COPY accepted all lines, but they are more or fewer rows. Nothing on the target can change that: triggers don't fire.
WRONG_COUNT = f"lines of the stored rows are damaged, so repeating the command does not help; run: {CHECK_NAMED}"


def hint_of(error: psycopg.Error) -> list[str]:
    """Return what to do about an error that a COPY of the snapshot's rows has raised."""
    state = error.diag.sqlstate or ""
    # A CHECK of a table or a domain has a name.
    if state == "23514" and error.diag.table_name and not error.diag.constraint_name:
        return [OTHER_PARTITION, IN_STEPS]
    # The name of an index, which may belong to no constraint.
    if state == "54000" and error.diag.constraint_name:
        return [INDEX_LIMIT, IN_STEPS]
    return list(next((lines for begin, lines in HINTS.items() if state.startswith(begin)), (SEE_LOG,)))


# What rows may be refused with because a CHECK or a function that reads other rows runs before they are there.
DEPENDENT = ("21", "22", "23", "38", "39", "P0")
OF_KEYS = ("23505", "23P01")


def may_depend_on_others(error: psycopg.Error) -> bool:
    """Whether the rows that a COPY refused may be accepted once other rows are there."""
    state = error.diag.sqlstate or ""
    return state.startswith(DEPENDENT) and state not in OF_KEYS
