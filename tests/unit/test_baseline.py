"""The baseline: which changes are refused, the most telling first, and which are allowed."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.messages import NEW_CHAIN
from cutline.nodes.baseline import (
    IDENTIFYING,
    BaselineChangedError,
    FleetTopologyError,
    FoundNode,
    NodeIdentity,
    can_decode,
    check_baseline,
    check_presence,
    check_topology,
    why_replaced,
)
from cutline.nodes.clocks import ClockReading
from cutline.storage.location import StoreLocation

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def identity(node: str, backup_of: str | None = None, **other: Any) -> NodeIdentity:
    found = NodeIdentity(node, backup_of, "7", 1, 5, "shop", 150013, "UTF8", "C", "C", backup_of is not None)
    return replace(found, **other)


def found(one: NodeIdentity, process: str) -> FoundNode:
    return FoundNode(one, process, ClockReading(one.node, NOON, NOON, NOON, 0.0))


def found_nodes(*identities: NodeIdentity) -> dict[str, FoundNode]:
    """Each identity on a separate server."""
    return {one.node: found(one, one.node) for one in identities}


WAS = {"a": identity("a"), "b": identity("b", system_identifier="8")}
WITH_STANDBY = WAS | {"a-b1": identity("a-b1", "a", server_version=160004)}


def fleet(*nodes: Node) -> Fleet:
    return Fleet(Path("fleet.toml"), "shop", StoreLocation("file:///s"), nodes, "exact", GroupRules(), "local[*]", {})


A, B, STANDBY, C = Node("a", "x"), Node("b", "y"), Node("a-b1", "z", "a"), Node("c", "w")


@pytest.mark.parametrize(("other", "message"), [
    ({"server_version": 180006, "system_identifier": "9", "database_oid": 6},
     "its server version was 15.13 at the full snapshot and is now 18.6: the server was upgraded"),
    ({"system_identifier": "9", "timeline": 2, "database_oid": 6}, "its system identifier was 7 .* and is now 9: its"),
    ({"timeline": 2}, "its timeline was 1 at the full snapshot and is now 2: a standby was promoted"),
    ({"database_oid": 6}, "its database oid was 5 at the full snapshot and is now 6: the database was dropped"),
    ({"database": "store", "database_oid": 6}, "its database was shop at the full snapshot and is now store"),
    ({"encoding": "LATIN1"}, "its encoding was UTF8 at the full snapshot and is now LATIN1"),
    ({"collate": "de_DE"}, "its collate was C at the full snapshot and is now de_DE"),
    ({"locale_provider": "i", "locale": "de"}, "its locale provider was c at the full snapshot and is now i"),
    ({"in_recovery": True}, "its in recovery was False"),
])  # fmt: skip
def test_a_changed_node_is_refused_with_its_most_telling_difference(other: dict[str, Any], message: str) -> None:
    with pytest.raises(BaselineChangedError, match=f"node a: {message}") as raised:
        check_baseline(WAS, WAS | {"a": replace(WAS["a"], **other)})
    assert raised.value.hint.endswith(NEW_CHAIN)
    assert ("--incremental --replaced a" in raised.value.hint) == bool({*other} & {*IDENTIFYING})
    assert raised.value.details["node"] == "a"


@pytest.mark.parametrize(("other", "reason"), [
    ({}, ""),
    ({"server_version": 150014, "timeline": 2}, ""),
    ({"database": "store"}, ""),
    ({"database_oid": 6}, "database shop was dropped and created again, or a restore replaced it"),
    ({"database_oid": 6, "database": "store"}, ""),
    ({"server_version": 180006, "system_identifier": "9"}, "its server was upgraded from PostgreSQL 15 to 18"),
    ({"server_version": 180006, "system_identifier": "9", "database_oid": 6}, ""),
    ({"server_version": 180006, "system_identifier": "9", "database": "store"}, ""),
    ({"server_version": 150014, "system_identifier": "9"}, ""),
])  # fmt: skip
def test_a_database_that_was_replaced_is_recognized(other: dict[str, Any], reason: str) -> None:
    now = replace(WAS["a"], **other)
    assert why_replaced(WAS["a"], now) == reason
    is_same = (now.system_identifier, now.database_oid) == ("7", 5)
    assert bool(why_replaced(WAS["a"], now, is_expected=True)) == (not is_same)


def test_a_minor_upgrade_and_a_restart_are_allowed() -> None:
    check_baseline(WAS, WAS | {"a": replace(WAS["a"], server_version=150014)})
    before, after = (found(WAS["a"], process) for process in ("1795000000.1:5432", "1795000099.1:5432"))
    assert before != after
    check_baseline({"a": before.identity}, {"a": after.identity})


@pytest.mark.parametrize(("was", "nodes", "message"), [
    (WAS, (A,), "node b: it is a shard of the chain, but not in fleet.toml"),
    (WITH_STANDBY, (A, B, Node("a-b1", "z", "b")), "node a-b1: it was a standby of a at .* and is now a standby of b"),
    (WITH_STANDBY, (A, B, Node("a-b1", "z")), "node a-b1: it was a standby of a at .* and is now a primary"),
    (WITH_STANDBY, (Node("a", "x", "a-b1"), B, Node("a-b1", "z")), "node a: it was a primary .* a standby of a-b1"),
])  # fmt: skip
def test_a_changed_fleet_file_is_refused_before_any_node_is_contacted(
    was: dict[str, NodeIdentity], nodes: tuple[Node, ...], message: str
) -> None:
    with pytest.raises(BaselineChangedError, match=message):
        check_presence(was, fleet(*nodes))


def test_a_standby_can_decode_from_postgresql_16_on() -> None:
    assert not can_decode(identity("a-b1", "a", server_version=150099))
    assert can_decode(identity("a-b1", "a", server_version=160000))
    assert can_decode(identity("a", server_version=150000))
    check_topology((A, STANDBY), found_nodes(identity("a"), identity("a-b1", "a")))


def test_a_shard_may_be_added_and_retired() -> None:
    assert check_presence(WAS, fleet(A, B, C)) == (A, B)
    assert check_presence(WITH_STANDBY, dataclasses.replace(fleet(B), retired=("a",))) == (B,)


def test_a_missing_shard_is_answered_with_the_line_that_retires_it_and_its_place() -> None:
    with pytest.raises(BaselineChangedError) as raised:
        check_presence(WAS, fleet(B))
    assert raised.value.hint.endswith('write before the file\'s first table: retired = ["a"]')


def test_standbys_may_be_added_and_removed() -> None:
    assert check_presence(WAS, fleet(A, STANDBY, B)) == (A, B)
    assert check_presence(WITH_STANDBY, fleet(A, B, STANDBY, Node("b-b1", "v", "b"))) == (A, B, STANDBY)
    assert check_presence(WITH_STANDBY, fleet(A, B)) == (A, B)


@pytest.mark.parametrize(("other", "message", "hint"), [
    ({"in_recovery": False}, "node a-b1 is not a standby, but fleet.toml says backup_of = a", "stop the other"),
    ({"system_identifier": "9"}, "node a-b1 is a standby of a different primary, not of a", "fleet.toml"),
    ({"database_oid": 6}, "node a-b1: its database shop is not a copy of a's", "caught up"),
    ({"server_version": 140013}, "node a-b1: PostgreSQL 14 is older than 15", "upgrade"),
])  # fmt: skip
def test_a_node_that_does_not_fit_the_topology_is_named(other: dict[str, Any], message: str, hint: str) -> None:
    found = found_nodes(identity("a"), identity("a-b1", "a", **({"server_version": 180006} | other)))
    with pytest.raises(FleetTopologyError, match=message) as raised:
        check_topology((A, STANDBY), found)
    assert hint in raised.value.hint
