"""The last cut of each node that is away is named, if the chain can be read; else the node's error stays as it is."""

from __future__ import annotations

import pytest

from cutline.nodes.connections import NodeUnreachableError
from cutline.snapshots.create.last_cuts import naming_last_cuts
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import read_continued
from cutline.storage.errors import UnreachableError
from tests.unit.made_repairs import NAME, MadeShard, item, upserts


def new_shard() -> MadeShard:
    history = [upserts(1200, item(1, "first"))]
    shard = MadeShard([item(1, "v1")], history, {"a": 150, "b": 50}, {"a": [[1000], [2000]], "b": [[1000], [2000]]})
    shard.take()
    return shard


def raised(shard: MadeShard, *away: str, chain: Chain | None = None) -> NodeUnreachableError:
    def read() -> Chain:
        if chain is None:
            raise UnreachableError("the store does not answer")
        return chain

    details: dict[str, object] = {"node": away[0]} | ({"nodes": list(away)} if len(away) > 1 else {})
    with pytest.raises(NodeUnreachableError) as error, naming_last_cuts(shard.store, read):
        raise NodeUnreachableError("away", hint="start it", details=details)
    assert error.value.hint == "start it"
    return error.value


def test_nodes_that_are_away_are_named_with_their_last_cuts() -> None:
    shard = new_shard()
    chain = read_continued(shard.store, NAME)
    at, where = chain.last.cut.made_at, f"last in the cut of increment 1 of {NAME} at {chain.last.cut.made_at}"
    assert raised(shard, "a", chain=chain).message == f"away; {where}"
    both = raised(shard, "a", "b", chain=chain)
    assert both.message == f"away; a, b: {where}"
    assert both.details["last_cuts"] == [{"node": node, "increment": 1, "cut_at": at} for node in ("a", "b")]
    # A node that the chain does not have yet has no cut.
    assert raised(shard, "a", "new", chain=chain).message == f"away; a: {where}"
    assert raised(shard, "new", chain=chain).message == "away"


def test_a_store_that_can_not_be_read_does_not_hide_the_error_of_the_node() -> None:
    error = raised(new_shard(), "a")
    assert error.message == "away"
    assert "last_cuts" not in error.details
