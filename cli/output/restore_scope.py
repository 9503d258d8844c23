"""The `restore` options that select part of a snapshot, or change names, owners or targets."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cutline.cli.output.arguments import check_text
from cutline.fleet.table_names import unquote_identifier
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import TableMove
from cutline.storage.errors import UsageError

QUOTED = r'"(?:[^"]|"")+"'
ROLE_PAIR = re.compile(rf"(?P<before>{QUOTED}|[^\"=][^=]*)=(?P<after>{QUOTED}|[^\"=][^=]*)", re.DOTALL)
TABLE_PART = rf"({QUOTED}|[^\".=*?\[]+)"
TABLE_PAIR = re.compile(rf"{TABLE_PART}\.{TABLE_PART}={TABLE_PART}\.{TABLE_PART}", re.DOTALL)
# These words mean "all roles" and "no role", and no role can have such a name.
NO_ROLES = ("public", "none")


def parse_role_map(pairs: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse the pairs of roles given with --role-map; raise UsageError."""
    found: dict[str, str] = {}
    for pair in pairs:
        check_text("--role-map", pair)
        names = ROLE_PAIR.fullmatch(pair)
        if names is None:
            raise UsageError(
                f"--role-map {pair!r} is not a pair of roles",
                hint="write it as before=after; a name that contains = or begins with a quote is quoted as in SQL:"
                " '\"a=b\"=c'",
            )
        before, after = unquote_identifier(names["before"]), unquote_identifier(names["after"])
        if before in found:
            raise UsageError(f"--role-map names role {before} twice", hint="map each role to only one role")
        if reserved := [name for name in (before, after) if name in NO_ROLES]:
            raise UsageError(f"--role-map {pair!r}: {reserved[0]} is not a role", hint="use role names")
        found[before] = after
    return tuple(found.items())


def parse_groups(values: Iterable[str]) -> tuple[tuple[str, ...], tuple[TableMove, ...]]:
    """Parse the patterns given with --group, and the tables that get new names; raise UsageError."""
    patterns, moves = list[str](), list[TableMove]()
    for value in values:
        if "=" not in value:
            patterns.append(value)
            continue
        check_text("--group", value)
        names = TABLE_PAIR.fullmatch(value)
        if names is None:
            raise UsageError(
                f"--group {value!r} does not name a table and its new name",
                hint='write it as schema.table=schema.table, without patterns; a name that contains one of .=*?[" is'
                " quoted as in SQL",
            )
        move = TableMove(*map(unquote_identifier, names.groups()))
        same = [
            table_move for table_move in moves if (table_move.schema, table_move.table) == (move.schema, move.table)
        ]
        if same or (move.schema, move.table) == (move.to_schema, move.to_table):
            raise UsageError(
                f"--group {value!r}: a table can have only one new name", hint="name each table once, with its new name"
            )
        moves.append(move)
    return tuple(patterns), tuple(moves)


def parse_routes(values: Iterable[str]) -> tuple[str, ...]:
    """Return the routes given with --route, which are parsed later, when the tables are known; raise UsageError."""
    routes = tuple(values)
    check_text("--route", *routes)
    return routes


def check_options(request: RestoreRequest) -> None:
    """Raise UsageError if options conflict."""
    scope = request.scope
    if scope.data_only:
        _check_data_only(request)
    if scope.schema_only and request.tables.is_partial:
        raise UsageError(
            "--schema-only restores no rows, so --group and --schema have nothing to select",
            hint="use only one of them",
        )
    if scope.schema_only and scope.analyze:
        raise UsageError("--schema-only restores no rows, so --analyze has nothing to do", hint="use only one of them")
    if scope.schema_only and request.use_backup_copies:
        raise UsageError(
            "--schema-only restores no rows, so none are taken from standbys' copies",
            hint="omit --use-backup-copies",
        )
    if scope.no_owner and request.create_roles:
        raise UsageError(
            "--no-owner needs no roles, so --create-roles has nothing to create", hint="use only one of them"
        )


def _check_data_only(request: RestoreRequest) -> None:
    scope = request.scope
    options = {
        "--schema-only": scope.schema_only,
        "--replace": request.replace,
        "--route": request.routes,
        "--no-owner": scope.no_owner,
        "--role-map": scope.role_map,
        "--create-roles": request.create_roles,
        "--no-database-settings": scope.no_database_settings,
    }
    if given := [option for option, value in options.items() if value]:
        raise UsageError(
            f"--data-only loads rows into existing tables as they are, so it can't be combined with {', '.join(given)}",
            hint="omit --data-only or the other options",
        )
    if scope.moves:
        raise UsageError(
            f"--group {scope.moves[0].label}: --data-only loads rows only into tables with the same names",
            hint="give only the table's name: --group S.T; or restore it under another name without --data-only",
        )
