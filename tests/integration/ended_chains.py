"""A chain that each test ends is the one that the test before it began: not every test takes a full snapshot."""

from __future__ import annotations

import re
from itertools import count

from cutline.fleet.config import Node
from cutline.fleet.messages import NEW_CHAIN
from cutline.snapshots.records.commit import Commit, Increment
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.slots import drop_slots
from tests.commands.snapshot_runs import Runs, slots_of
from tests.integration.refusing import refused, take_increment

NAMES = (f"chain-{number}" for number in count(1))
LATEST_CHAINS: dict[tuple[Node, ...], Commit] = {}


def begin_chain(runs: Runs) -> Commit:
    """Follow NEW_CHAIN command by command, after dropping the slots of the chains that have ended."""
    for node in runs.fleet.nodes:
        for slot in slots_of(node.dsn):
            assert drop_slots([node], slot) == []
    runs.init()
    LATEST_CHAINS.clear()
    commit = LATEST_CHAINS[runs.fleet.nodes] = runs.full(next(NAMES))
    return commit


def continue_chain(runs: Runs) -> Commit:
    """Add an increment to the chain that the previous test began, or to a new one; the caller ends the chain."""
    commit = LATEST_CHAINS.pop(runs.fleet.nodes, None) or begin_chain(runs)
    LATEST_CHAINS.clear()
    runs.increment(commit.snapshot)
    return commit


def assert_refused(runs: Runs, name: str, slug: str, what: str) -> SnapshotError:
    """Check that the next increment of `name` is refused with a message that has `what`; the hint ends in NEW_CHAIN."""
    with refused(runs.fleet, slug) as errors:
        take_increment(runs.fleet, name)
    assert re.search(what, errors[0].message), errors[0].message
    assert errors[0].hint.endswith(NEW_CHAIN), errors[0].hint
    return errors[0]


def assert_renewed(runs: Runs, name: str, node: str, what: str) -> None:
    """Check that the next increment of `name` copies the node again for a reason that has `what`, and is valid."""
    commit = runs.increment(name)
    assert isinstance(commit, Increment)
    assert re.search(what, commit.renewed[node].reason), commit.renewed
    assert runs.check_one(name).conflicts == []
