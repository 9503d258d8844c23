"""Which server of a shard is its primary, from what its servers have answered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutline.fleet.config import Fleet, Node
from cutline.nodes.roles import ServerState, find_promoted, in_current_roles, with_exchanged
from cutline.nodes.watch import NodeAnswers
from tests.unit.made_fleets import new_fleet

PRIMARY, STANDBY = (ServerState(is_in_recovery=state, system_identifier="1") for state in (False, True))
OTHER = ServerState(is_in_recovery=False, system_identifier="2")


@pytest.fixture
def fleet() -> Fleet:
    nodes = [("a", None, "a"), ("a1", "a", "b"), ("a2", "a", "c")]
    made = new_fleet()
    first = made.nodes[0]
    shaped = [replace(first, id=node, backup_of=primary, dsn=f"host={host} dbname=x") for node, primary, host in nodes]
    return replace(made, nodes=tuple(shaped))


@pytest.mark.parametrize(
    ("a", "a1", "a2", "promoted"),
    [
        (PRIMARY, STANDBY, STANDBY, {}),
        (None, STANDBY, STANDBY, {}),
        (None, PRIMARY, STANDBY, {"a": "a1"}),
        (STANDBY, STANDBY, PRIMARY, {"a": "a2"}),
        (None, None, PRIMARY, {"a": "a2"}),
        # The primary also accepts writes, or two standbys do.
        (PRIMARY, PRIMARY, STANDBY, {}),
        (None, PRIMARY, PRIMARY, {}),
        # A server of another cluster takes no place.
        (STANDBY, OTHER, STANDBY, {}),
    ],
)
def test_a_promoted_standby_takes_its_primarys_place(
    fleet: Fleet, a: ServerState | None, a1: ServerState | None, a2: ServerState | None, promoted: dict[str, str]
) -> None:
    assert find_promoted(fleet, {"a": a, "a1": a1, "a2": a2}) == promoted


def test_a_known_system_identifier_is_compared(fleet: Fleet) -> None:
    servers = {"a": None, "a1": PRIMARY, "a2": STANDBY}
    assert find_promoted(fleet, servers, {"a": "1"}) == {"a": "a1"}
    assert find_promoted(fleet, servers, {"a": "2"}) == {}
    # Shards about which nothing was asked stay as they are.
    assert find_promoted(fleet, {"a1": PRIMARY}) == {}


def test_answers_are_returned_by_role(fleet: Fleet) -> None:
    def dsns(nodes: tuple[Node, ...]) -> list[str]:
        return [node.dsn.partition(" ")[0] for node in nodes]

    asked = NodeAnswers({"a1": PRIMARY, "a2": STANDBY}, {"a": "no answer"})
    roles = in_current_roles(fleet, asked, lambda answer: answer)
    found = roles.fleet
    assert roles.promoted == {"a": "a1"}
    assert roles.answers == NodeAnswers({"a": PRIMARY, "a2": STANDBY}, {"a1": "no answer"})
    assert dsns(found.nodes) == ["host=b", "host=a", "host=c"]
    assert [(node.id, node.backup_of) for node in found.nodes] == [("a", None), ("a1", "a"), ("a2", "a")]
    assert dsns(with_exchanged(found, roles.promoted).nodes) == ["host=a", "host=b", "host=c"]
