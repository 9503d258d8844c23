"""The majority of the recorded primaries: who may create and who may not, in any order."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import combinations

import pytest
from msgspec import structs

from cutline.nodes.baseline import NodeIdentity
from cutline.snapshots.operations.majority import (
    MajorityMissingError,
    OtherServersError,
    RecordedPrimaries,
    check_majority,
    claim_majority,
    forget_nodes,
    read_recorded_primaries,
)
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore

FOUR = ("s1", "s2", "s3", "s4")


def identities(*nodes: str) -> dict[str, NodeIdentity]:
    return {
        node: NodeIdentity(node, None, f"7{node[1:]}", 1, 5, "shop", 180000, "UTF8", "C", "C", in_recovery=False)
        for node in nodes
    }


def read_records(store: ObjectStore) -> list[set[str]]:
    return [{entry["node"] for entry in json.loads(store.read(key))["primaries"]} for key in store.list("baselines")]


@pytest.mark.parametrize("size", range(1, 8))
def test_no_two_disjoint_parts_of_a_fleet_both_have_the_majority(size: int) -> None:
    nodes = [f"s{number}" for number in range(1, size + 1)]

    def has_majority(part: set[str]) -> bool:
        try:
            check_majority(RecordedPrimaries(1, tuple(nodes)), identities(*part))
        except MajorityMissingError:
            return False
        return True

    parts = [set(part) for count in range(size + 1) for part in combinations(nodes, count)]
    majorities = [part for part in parts if has_majority(part)]
    assert all(one & other for one in majorities for other in majorities)
    assert {len(part) for part in majorities} == {count for count in range(size + 1) if 2 * count > size}


def test_the_refusal_has_the_numbers_and_the_missing_nodes() -> None:
    with pytest.raises(MajorityMissingError) as raised:
        check_majority(RecordedPrimaries(1, FOUR), identities("s1", "s2"))
    error = raised.value
    assert "2 of the 4 recorded primaries" in error.message
    assert "3 are needed" in error.message
    assert "missing: s3, s4" in error.message
    assert "--forget-nodes" in error.hint
    assert (error.exit_code, error.slug) == (3, "majority-missing")
    assert error.details == {"granted": ["s1", "s2"], "baseline": list(FOUR), "needed": 3, "missing": ["s3", "s4"]}


def test_only_a_larger_fleet_is_recorded() -> None:
    store = InMemoryStore("memory://baselines")
    claim_majority(store, identities("s1", "s2"))
    claim_majority(store, identities("s1", "s2"))
    claim_majority(store, identities(*FOUR))
    claim_majority(store, identities("s1", "s2", "s3"))
    assert read_records(store) == [{"s1", "s2"}, set(FOUR)]
    assert read_recorded_primaries(store).primaries == FOUR


def test_of_two_halves_that_begin_with_an_empty_store_the_second_is_refused() -> None:
    store = InMemoryStore("memory://baselines")
    claim_majority(store, identities("s1", "s2"))
    with pytest.raises(MajorityMissingError):
        claim_majority(store, identities("s3", "s4"))
    assert read_records(store) == [{"s1", "s2"}]


def test_of_two_halves_that_both_found_the_store_empty_the_second_to_record_is_refused() -> None:
    others = [identities("s3", "s4")]

    class Racing(InMemoryStore):
        """Another command records its half between our read and our put."""

        def create(self, key: str, body: bytes) -> None:
            while others:
                claim_majority(self, others.pop())
            InMemoryStore.create(self, key, body)

    store = Racing("memory://baselines")
    with pytest.raises(MajorityMissingError):
        claim_majority(store, identities("s1", "s2"))
    assert read_records(store) == [{"s3", "s4"}]


def test_after_forgetting_nodes_the_majority_is_of_the_remaining_ones() -> None:
    store = InMemoryStore("memory://baselines")
    claim_majority(store, identities(*FOUR))
    assert forget_nodes(store, identities("s1")) == ["s2", "s3", "s4"]
    claim_majority(store, identities("s1"))
    with pytest.raises(MajorityMissingError):
        claim_majority(store, identities("s2", "s3", "s4"))
    claim_majority(store, identities("s1", "s5"))
    assert read_records(store) == [set(FOUR), {"s1"}, {"s1", "s5"}]


def test_forgetting_nodes_keeps_the_timeline_of_a_promoted_server() -> None:
    store = InMemoryStore("memory://baselines")
    nodes = identities(*FOUR)
    promoted = {node: structs.replace(one, timeline=one.timeline + 2) for node, one in nodes.items()}
    claim_majority(store, promoted)
    assert forget_nodes(store, {"s1": nodes["s1"]}) == ["s2", "s3", "s4"]
    assert read_recorded_primaries(store).timelines == {"s1": promoted["s1"].timeline}


def test_forgetting_nothing_records_nothing() -> None:
    store = InMemoryStore("memory://baselines")
    assert forget_nodes(store, identities(*FOUR)) == []
    claim_majority(store, identities("s1", "s2"))
    assert forget_nodes(store, identities(*FOUR)) == []
    assert read_records(store) == [{"s1", "s2"}]


def replaced(nodes: dict[str, NodeIdentity], *others: str) -> dict[str, NodeIdentity]:
    """The nodes, with other servers in the place of some."""
    return {
        node: structs.replace(identity, system_identifier=f"9{node}") if node in others else identity
        for node, identity in nodes.items()
    }


@pytest.mark.parametrize("size", range(1, 8))
def test_any_two_commands_hold_a_server_in_common(size: int) -> None:
    nodes = [f"s{number}" for number in range(1, size + 1)]
    recorded = RecordedPrimaries(
        1, tuple(nodes), {node: one.system_identifier for node, one in identities(*nodes).items()}
    )
    allowed: list[set[str]] = []
    for count in range(size + 1):
        for part in combinations(nodes, count):
            for number in range(count + 1):
                for others in combinations(part, number):
                    granted = replaced(identities(*part), *others)
                    with suppress(MajorityMissingError, OtherServersError):
                        check_majority(recorded, granted)
                        allowed.append({one.system_identifier for one in granted.values()})
    of_the_recorded = [one for one in allowed if not any(identifier.startswith("9") for identifier in one)]
    assert of_the_recorded
    assert all(one & other for one in allowed for other in of_the_recorded)
    # One of several may be replaced without a word.
    assert any(len([each for each in one if each.startswith("9")]) == 1 for one in allowed) == (size > 1)


def test_another_fleet_with_the_same_node_ids_is_refused_until_an_operator_says_that_it_is_the_fleet_now() -> None:
    store, nodes = InMemoryStore("memory://baselines"), ("s1", "s2", "s3")
    claim_majority(store, identities(*nodes))
    foreign = replaced(identities(*nodes), *nodes)
    with pytest.raises(OtherServersError) as raised:
        claim_majority(store, foreign)
    error = raised.value
    was = "node s1 is not the recorded server: its system identifier was 71, but is now 9s1; node s2"
    assert error.message.startswith(was)
    assert "use a separate store" in error.hint
    assert "snapshot init --forget-nodes" in error.hint
    assert (error.exit_code, error.slug) == (3, "other-servers")
    assert len(read_records(store)) == 1
    assert forget_nodes(store, foreign) == [*nodes]
    claim_majority(store, foreign)
    with pytest.raises(OtherServersError):
        claim_majority(store, identities(*nodes))


def test_servers_that_are_replaced_one_by_one_are_recorded() -> None:
    store = InMemoryStore("memory://baselines")
    claim_majority(store, identities(*FOUR))
    # A node that is away stays recorded.
    for present, others in ((FOUR[:3], FOUR[:1]), (FOUR, FOUR[:2]), (FOUR[1:], FOUR[:3]), (FOUR, FOUR)):
        claim_majority(store, replaced(identities(*present), *others))
        assert read_recorded_primaries(store).primaries == FOUR
    assert len(read_records(store)) == 5
    with pytest.raises(OtherServersError):
        claim_majority(store, identities(*FOUR))


def renamed(nodes: dict[str, NodeIdentity], ids: dict[str, str]) -> dict[str, NodeIdentity]:
    return {ids.get(node, node): identity for node, identity in nodes.items()}


def test_a_recorded_server_counts_under_another_id_and_is_recorded_with_it() -> None:
    store = InMemoryStore("memory://baselines")
    claim_majority(store, identities(*FOUR))
    one = renamed(identities(*FOUR), {"s4": "east"})
    claim_majority(store, one)
    claim_majority(store, one)
    assert read_records(store) == [set(FOUR), {"s1", "s2", "s3", "east"}]
    # All of them at once, and two that exchange their ids.
    every = {"s1": "a", "s2": "b", "s3": "c", "s4": "d"}
    claim_majority(store, renamed(identities(*FOUR), every))
    exchanged = renamed(identities(*FOUR), {**every, "s1": "b", "s2": "a"})
    claim_majority(store, exchanged)
    recorded = read_recorded_primaries(store)
    assert recorded.identifiers == {node: one.system_identifier for node, one in exchanged.items()}
    assert recorded.others(exchanged) == []
    assert forget_nodes(store, exchanged) == []
    # Half of them are not enough, whatever they are called.
    with pytest.raises(MajorityMissingError):
        claim_majority(store, renamed(identities("s1", "s2"), {"s1": "x", "s2": "y"}))


def test_a_server_that_several_nodes_have_in_common_counts_by_its_id() -> None:
    """As after the servers of a fleet were cloned from each other."""
    store = InMemoryStore("memory://baselines")
    alike = {node: structs.replace(one, system_identifier="7") for node, one in identities("s1", "s2", "s3").items()}
    claim_majority(store, alike)
    claim_majority(store, renamed(alike, {"s3": "east"}))
    with pytest.raises(MajorityMissingError):
        claim_majority(store, renamed(alike, {"s3": "east", "s2": "west"}))
    assert len(read_records(store)) == 1
