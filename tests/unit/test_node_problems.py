"""What nodes lack, as an error and as lines for people."""

from __future__ import annotations

import pytest

from cutline.fleet.config import Node
from cutline.nodes.problems import (
    NodeProblem,
    NodeUnfitError,
    Place,
    Purpose,
    actions_of,
    addresses_of,
    grants_of,
    optional_lines,
    refuse_unfit,
)

NODES = ("s1", "s2")
GRANT, OWN = 'GRANT "a" TO "b";', 'ALTER DATABASE "shop" OWNER TO "b";'
ACTION = "membership of postgres would make b a superuser"
REQUIRED = [NodeProblem(node, "role b can't read t", GRANT, Place(node, "shop")) for node in NODES]
TERMINAL = [
    NodeProblem(node, "role b does not own database shop", OWN, Place(node, "shop"), Purpose.TERMINAL) for node in NODES
]
NEW_TABLES = [NodeProblem(node, "role b can't publish t", ACTION, purpose=Purpose.NEW_TABLES) for node in NODES]


def test_an_error_names_equal_problems_once_and_only_what_is_required() -> None:
    with pytest.raises(NodeUnfitError) as raised:
        refuse_unfit([*REQUIRED, *TERMINAL, *NEW_TABLES])
    assert raised.value.message == "nodes s1, s2: role b can't read t"
    assert [line for line in raised.value.hint.splitlines() if not line.startswith("-- ")] == [GRANT]
    # Scripts find everything.
    assert {one["statement"] for one in grants_of([*REQUIRED, *TERMINAL])} == {GRANT, OWN}
    assert raised.value.details["grants"] == grants_of([*REQUIRED, *TERMINAL])
    assert raised.value.details["actions"] == actions_of(NEW_TABLES)


def test_a_hint_with_statements_is_runnable_as_a_whole() -> None:
    action = NodeProblem("s1", "role b can't publish t", ACTION)
    with pytest.raises(NodeUnfitError) as raised:
        refuse_unfit([action, *REQUIRED])
    assert [line for line in raised.value.hint.splitlines() if not line.startswith("-- ")] == [GRANT]
    with pytest.raises(NodeUnfitError) as raised:
        refuse_unfit([action])
    assert raised.value.hint == ACTION


def test_what_only_some_tasks_need_follows_that_the_role_is_enough() -> None:
    enough = "the role of the dsn has the privileges that every create of these tables needs; other tasks need more"
    assert optional_lines([]) == []
    assert optional_lines(NEW_TABLES) == [enough, f"for {Purpose.NEW_TABLES}, on s1, s2: {ACTION}"]
    assert optional_lines(TERMINAL) == [
        enough,
        "to grant what other tasks need, run:",
        "-- as a superuser on s1, database shop; s2, database shop; for create --terminal and resume:",
        OWN,
    ]
    assert grants_of(NEW_TABLES) == []


def test_with_addresses_the_hint_is_one_script_for_all_servers_and_comments_out_what_other_tasks_need() -> None:
    dsns = {"s1": "host=db1 port=5433 user=b password=secret", "s2": "host=db2,db3 dbname=shop"}
    addresses = addresses_of([Node(id=name, dsn=dsn) for name, dsn in dsns.items()])
    with pytest.raises(NodeUnfitError) as raised:
        refuse_unfit([*REQUIRED, *TERMINAL], addresses)
    assert raised.value.hint.splitlines() == [
        "-- run it all in psql, as a superuser:",
        '\\connect -reuse-previous=on "host=db1 port=5433 dbname=shop"',
        "-- node s1, database shop; for init and every create:",
        GRANT,
        "-- node s1, database shop; for create --terminal and resume:",
        f"-- {OWN}",
        '\\connect -reuse-previous=on "dbname=shop host=db2,db3 target_session_attrs=primary"',
        "-- node s2, database shop; for init and every create:",
        GRANT,
        "-- node s2, database shop; for create --terminal and resume:",
        f"-- {OWN}",
    ]
    assert OWN in optional_lines(TERMINAL, addresses)
