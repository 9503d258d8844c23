"""Which nodes of a chain the nodes of fleet.toml are, by their identities; servers are in tests/integration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.chain_ids import naming_listed_ids, renamed_nodes, with_chain_ids
from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.progress import Silent
from cutline.nodes.baseline import FleetTopologyError, NodeIdentity
from cutline.nodes.connections import NodeUnreachableError
from cutline.snapshots.create.absent_copies import repeat_without_failed
from cutline.snapshots.create.renamed import find_renamed
from cutline.snapshots.records.chain import Chain
from cutline.storage.location import StoreLocation
from tests.unit.made_commits import full_commit, identity, increment_commit

STANDBYS = {"a": ("a-b1", "a-b2"), "b": ("b-b1",), "c": ()}


def server(node: str, number: int, backup_of: str | None = None) -> NodeIdentity:
    return structs.replace(identity(node, backup_of), system_identifier=f"7{number}")


def chain(*, cloned: bool = False, renamed: Mapping[str, str] | None = None, retired: tuple[str, ...] = ()) -> Chain:
    """A chain of three shards, with 2, 1 and no standbys; `cloned` servers have one system identifier."""
    baseline = [
        server(node, 0 if cloned else number, backup_of)
        for number, shard in enumerate(STANDBYS)
        for node, backup_of in ((shard, None), *((standby, shard) for standby in STANDBYS[shard]))
    ]
    full = structs.replace(full_commit(), baseline=tuple(baseline))
    return Chain(full, (structs.replace(increment_commit(1), renamed=dict(renamed or {}), retired=retired),))


def fleet(ids: Mapping[str, str], retired: tuple[str, ...] = ()) -> Fleet:
    """The same nodes with other ids in the file."""
    nodes = [
        Node(ids.get(node, node), f"dbname={node}", ids.get(shard, shard) if node != shard else None)
        for shard in STANDBYS
        for node in (shard, *STANDBYS[shard])
    ]
    store = StoreLocation("file:///s")
    return Fleet(
        Path("fleet.toml"), "shop", store, tuple(nodes), "exact", GroupRules(), "local[*]", {}, retired=retired
    )


def found(
    of: Chain,
    ids: Mapping[str, str],
    *,
    lost: tuple[str, ...] = (),
    away: tuple[str, ...] = (),
    replaced: tuple[str, ...] = (),
    retired: tuple[str, ...] = (),
) -> dict[str, str]:
    """What is recognised on servers with the chain's slot, but for those that have `lost` it or are `away`."""
    baseline = {one.node: one for one in of.full.baseline}
    identities = {ids.get(node, node): baseline[node] for node in STANDBYS if node not in away}

    def has_slot(node: Node) -> bool | None:
        known = node.dsn.removeprefix("dbname=")
        return None if known in away else known not in lost

    return find_renamed(fleet(ids, retired), of, identities, has_slot, replaced)


@pytest.mark.parametrize("ids", [
    {},
    {"a": "x"},
    {"a": "x", "a-b1": "x-b1", "a-b2": "x-b2"},
    {"a": "x", "a-b1": "x-b1", "b": "y", "b-b1": "y-b1", "c": "z"},
    {"b-b1": "replica"},
])  # fmt: skip
def test_databases_are_recognised_and_nothing_has_to_be_recorded_for_that(ids: dict[str, str]) -> None:
    assert found(chain(), ids) == ids
    assert found(chain(renamed={"a": "old", "b-b1": "older"}), ids) == ids
    translated = with_chain_ids(fleet(ids), ids)
    assert [(node.id, node.backup_of) for node in translated.nodes] == [
        (node.id, node.backup_of) for node in fleet({}).nodes
    ]
    assert renamed_nodes(translated) == ids


def test_databases_that_were_cloned_are_known_by_their_ids_alone() -> None:
    assert found(chain(cloned=True), {}) == {}
    assert found(chain(cloned=True, renamed={"c": "z"}), {"c": "z"}) == {"c": "z"}
    # Nothing shows that z is c.
    assert found(chain(cloned=True), {"c": "z"}) == {}


def test_a_standby_without_the_slot_is_another_and_one_that_is_away_is_so_unless_its_shard_is_renamed() -> None:
    assert found(chain(), {"a-b1": "x", "a-b2": "y"}, lost=("a-b1",)) == {"a-b1": "y"}
    assert found(chain(), {"a-b1": "x"}, away=("a-b1",)) == {}
    ids = {"b": "y", "b-b1": "y-b1"}
    assert found(chain(), ids, away=("b-b1",)) == ids
    assert found(chain(), ids, lost=("b-b1",)) == {"b": "y"}


@pytest.mark.parametrize("ids", [
    {"a": "b", "b": "a"},
    {"a": "b", "b": "c", "c": "a"},
    {"a": "b", "b": "y"},
    {"c": "a-b1", "a-b1": "x"},
    {"b-b1": "b", "b": "y"},
])  # fmt: skip
def test_no_id_of_a_node_means_another(ids: dict[str, str]) -> None:
    if ids != {"b-b1": "b", "b": "y"}:
        with pytest.raises(FleetTopologyError) as refused:
            found(chain(), ids)
        assert "the chain has another" in refused.value.message
        return
    # A standby never takes the id of another node of the chain: it is one that was added.
    assert found(chain(), ids) == {"b": "y"}


def test_the_id_that_a_shard_had_is_not_given_to_another() -> None:
    # c is z now, and the server of a new shard is called c.
    listed = fleet({"c": "z"})
    listed = replace(listed, nodes=(*listed.nodes, Node("c", "dbname=new")))
    identities = {"a": server("a", 0), "b": server("b", 1), "z": server("z", 2), "c": server("c", 9)}
    with pytest.raises(FleetTopologyError, match="node c: it has the id of a shard of the chain that is called z now"):
        find_renamed(listed, chain(), identities, lambda _: True)


def test_what_the_file_says_about_a_shard_counts_more_than_its_identity() -> None:
    assert found(chain(), {"c": "z"}, retired=("c",)) == {}
    assert found(chain(), {"a": "b", "b": "a"}, replaced=("a", "b")) == {}
    # The id of a shard that has left stays its own.
    gone = chain(renamed={"c": "z"}, retired=("c",))
    assert found(gone, {"c": "z"}) == {"c": "z"}
    assert found(gone, {"c": "w"}) == {"c": "z"}


def test_a_file_that_lists_both_ids_means_both() -> None:
    listed = fleet({"c": "z"})
    both = replace(listed, nodes=(*listed.nodes, Node("c", "dbname=new")))
    assert with_chain_ids(both, {"c": "z"}) == both


def test_an_error_about_a_renamed_node_has_its_id_in_the_file() -> None:
    translated = with_chain_ids(fleet({"c": "z"}), {"c": "z"})
    with pytest.raises(FleetTopologyError) as raised, naming_listed_ids(translated):
        raise FleetTopologyError("node c: gone", hint="start it", details={"node": "c"})
    assert "in this chain, z has the id c" in raised.value.hint


def test_a_create_begins_again_without_a_renamed_standby_that_fails() -> None:
    translated, calls = with_chain_ids(fleet({"b-b1": "other"}), {"b-b1": "other"}), list[int]()

    def create(_: Callable[[], None]) -> str:
        calls.append(1)
        if len(calls) == 1:
            raise NodeUnreachableError("node b-b1: gone", hint="start it", details={"node": "b-b1"})
        return "taken"

    assert repeat_without_failed(translated, Silent(), create) == "taken"


def test_a_create_that_has_begun_to_store_does_not_begin_again() -> None:
    """Before the call that says so, the same error lets it begin again."""
    calls = list[int]()

    def create(begins: Callable[[], None]) -> str:
        calls.append(1)
        if len(calls) == 2:
            begins()
        raise NodeUnreachableError("node b-b1: gone", hint="start it", details={"node": "b-b1"})

    with pytest.raises(NodeUnreachableError):
        repeat_without_failed(fleet({}), Silent(), create)
    assert len(calls) == 2
