"""`restore --no-owner`: everything belongs to the role that restores, on a server without the roles or with them."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.snapshot_runs import Ready, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.integration.parts.two_places import (
    GRANTOR,
    NAME,
    OWNER,
    PLAIN,
    READER,
    ROLES,
    TwoPlaces,
    ask,
    await_sessions_over,
    quoted,
    roles_of,
    value,
)
from tests.integration.refusing import execute

SUPERUSER, RESTORER = "postgres", "restorer"


def owners(fleet: Fleet) -> set[str]:
    """The owners of everything but policies and user mappings, which are for roles."""
    found = {row[2] for row in roles_of(fleet) if row[0] not in ("policy", "user mapping", "column")}
    return found - {"pg_database_owner"}


def grantees(fleet: Fleet) -> set[tuple[str, str, str]]:
    """What is granted to others than the owner, as kind, name and grantee."""
    return {(*row[:2], row[4]) for row in roles_of(fleet) if row[4] and row[4] != row[2] and "public" not in row[1]}


def test_missing_roles_are_no_obstacle_and_what_they_had_is_named(places: TwoPlaces) -> None:
    planned = places.restore("--no-owner", "--dry-run")
    done = places.restore("--no-owner")
    assert done["left_out"] == planned["left_out"]
    assert (done["roles_created"], owners(places.other)) == ([], {SUPERUSER})
    assert grantees(places.other) == {
        ("schema", "app", "PUBLIC"), ("table", "app.line", "PUBLIC"), ("large object", "4711", "PUBLIC"),
    }  # fmt: skip
    dsn = places.other.primaries[0].dsn
    assert ask(dsn, "SELECT polname FROM pg_policy") == [("everybody",)]
    assert ask(dsn, "SELECT usename FROM pg_user_mappings") == [("public",)]
    assert value(places.other, "SELECT count(*) FROM pg_default_acl") == 0
    assert sorted_copies(dsn) == sorted_copies(places.fleet.primaries[0].dsn)
    reader = READER.replace("ü", "\\xfc")
    assert {line.removesuffix(" on s1: the target has no such role") for line in done["left_out"]} == {
        *(f'privileges on schema "app" of role {role}' for role in (reader, GRANTOR)),
        *(f'privileges on table "app"."customer" of role {role}' for role in (reader, GRANTOR)),
        f'privileges on column "app"."customer"."name" of role {reader}',
        f'privileges on function "app"."one"() of role {reader}',
        *(f'policy "app".line {policy} of role {reader}' for policy in ("readers", "several")),
        f'policy "app".line several of role {GRANTOR}',
        *(f'default privileges for tables in schema "app" of role {role}' for role in (OWNER, GRANTOR)),
        *(f"USER MAPPING {role} SERVER remote of role {role}" for role in (reader, GRANTOR)),
        f"any privileges of role {', '.join(sorted(ROLES))} on large objects",
    }


def test_a_role_that_exists_keeps_what_it_was_granted(places: TwoPlaces) -> None:
    """Of two roles that a policy is for, the other one is left out."""
    done = places.restore("--no-owner", to=places.beside, name=PLAIN)
    of = 'default privileges for tables in schema "app" of role'
    assert sorted(done["left_out"]) == sorted(
        f"{of} {role} on s1: it is not the restoring role" for role in (OWNER, GRANTOR)
    )
    assert owners(places.beside) == {SUPERUSER}
    found = roles_of(places.beside)
    assert {row[2] for row in found if row[:2] == ("policy", "several")} == {READER, GRANTOR}
    granted = {row[3:] for row in found if row[:2] == ("table", "app.customer") and row[4] != SUPERUSER}
    assert granted == {
        (SUPERUSER, GRANTOR, "SELECT", "True"), (SUPERUSER, READER, "SELECT", "False"),
    }  # fmt: skip
    large = {row[3:] for row in found if row[0] == "large object" and row[4] != SUPERUSER}
    assert large == {
        (SUPERUSER, GRANTOR, "SELECT", "True"), (SUPERUSER, READER, "SELECT", "False"),
        (SUPERUSER, "PUBLIC", "UPDATE", "False"),
    }  # fmt: skip


def test_a_role_that_is_no_superuser_and_no_member_restores_it(places: TwoPlaces) -> None:
    fleet = as_restorer(places)
    done = places.restore("--no-owner", to=fleet, name=PLAIN)
    assert owners(places.other) == {RESTORER}
    assert sorted_copies(places.other.primaries[0].dsn) == sorted_copies(places.fleet.primaries[0].dsn)
    assert any(f"of role {GRANTOR}" in line for line in done["left_out"])


def test_such_a_role_gives_a_table_another_name(places: TwoPlaces) -> None:
    """Schema public belongs to the owner of the database, whoever that is."""
    fleet = as_restorer(places)
    places.restore("--no-owner", "--group", "public.item=free.thing", to=fleet, name=PLAIN)
    assert value(places.other, "SELECT count(*) FROM free.thing") == 10
    assert value(places.other, "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'free'") == RESTORER


def test_with_a_role_map_what_was_granted_goes_to_the_other_role(places: TwoPlaces) -> None:
    execute(with_database(places.other.primaries[0], "postgres").dsn, "CREATE ROLE visitor")
    places.restore("--no-owner", "--role-map", f"{quoted(READER)}=visitor")
    assert owners(places.other) == {SUPERUSER}
    assert ("table", "app.customer", "visitor") in grantees(places.other)
    assert {row[2] for row in roles_of(places.other) if row[0] == "policy"} == {"-", "visitor"} - {"-"} | {
        row[2] for row in roles_of(places.other) if row[:2] == ("policy", "everybody")
    }


def test_a_restore_that_is_resumed_has_no_other_owners(places: TwoPlaces) -> None:
    def then(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.ROWS_LOADED):
            raise NodeUnreachableError("node s1: it is gone", hint="bring it back")

    request = RestoreRequest(NAME, scope=RestoreScope(no_owner=True))
    with pytest.raises(NodeUnreachableError):
        restore_fleet(plan_restore(places.fleet, places.other, request), Ready(places.spark), Watching(then))
    await_sessions_over(places.other)
    resume_restore(places.fleet, places.other, RestoreRequest(NAME), Ready(places.spark), Silent())
    assert owners(places.other) == {SUPERUSER}
    assert not {name for row in roles_of(places.other) for name in row} & set(ROLES)


def test_it_excludes_creating_roles(places: TwoPlaces) -> None:
    refused = places.refuse("--no-owner", "--create-roles")
    assert (refused["code"], refused["error"]) == (2, "usage")


def as_restorer(places: TwoPlaces) -> Fleet:
    """The target as a role that may create databases, and no more."""
    node = places.other.primaries[0]
    with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {RESTORER} LOGIN CREATEDB")
        connection.execute(f"GRANT pg_read_all_stats TO {RESTORER}")
    path = places.other.path.with_name("restorer.toml")
    path.write_text(places.other.path.read_text().replace(node.dsn, make_conninfo(node.dsn, user=RESTORER)))
    return load_fleet(path)
