"""The commands of hints that restore in two steps restore the same: each takes the options that concern it."""

from __future__ import annotations

import shlex

import pytest

from cutline.cli.output.restore_scope import check_options, parse_role_map
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import RestoreScope, TableMove

ROLES = (("a b", "c"), ("d=e", '"f'))
SCOPE = RestoreScope(nodes=("s1", "s2"), role_map=ROLES, no_database_settings=True)
REQUEST = RestoreRequest("nightly", replace=True, create_roles=True, allow_refused_ddl=True, scope=SCOPE)


def test_each_step_takes_the_options_that_concern_it() -> None:
    tables, rows = REQUEST.steps(3) or ("", "")
    words = shlex.split(tables)
    nodes = ["--node", "s1", "--node", "s2"]
    assert words[:8] == ["snapshot", "restore", "nightly", *nodes, "--schema-only"]
    assert parse_role_map(words[9:12:2]) == ROLES
    assert words[12:] == ["--create-roles", "--replace", "--no-database-settings", "--increment", "3"]
    assert shlex.split(rows) == ["snapshot", "restore", "nightly", *nodes, "--data-only", "--increment", "3"]


def test_options_of_rows_are_in_the_second_step() -> None:
    scope = RestoreScope(schemas=("app",), no_owner=True, analyze=True)
    request = RestoreRequest("nightly", increment=1, groups=("public.t*",), use_backup_copies=True, scope=scope)
    assert request.steps(1) == (
        "snapshot restore nightly --schema-only --no-owner --increment 1",
        "snapshot restore nightly --group 'public.t*' --schema app --data-only --analyze --increment 1"
        " --use-backup-copies",
    )
    check_options(RestoreRequest("nightly", 1, scope=RestoreScope(schema_only=True, no_owner=True)))


@pytest.mark.parametrize(
    "request_",
    [
        RestoreRequest("nightly", routes=("public.t=hash(id)",)),
        RestoreRequest("nightly", scope=RestoreScope(moves=(TableMove("a", "b", "c", "d"),))),
        RestoreRequest("nightly", is_drill=True),
    ],
)
def test_rows_that_go_elsewhere_have_no_steps(request_: RestoreRequest) -> None:
    assert request_.steps(1) is None
