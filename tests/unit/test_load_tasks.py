"""The tasks that load base objects: one for each object with wanted rows, those of many nodes in each job."""

from __future__ import annotations

from itertools import islice

from cutline.fleet.config import Node
from cutline.nodes.groups import Group
from cutline.restore.rows.jobs import base_tasks
from cutline.restore.rows.load import Feed, LoadTarget
from cutline.snapshots.fold.sources import BaseSource, BaseSources, Source, Sources
from cutline.storage.location import StoreLocation

NODES, OBJECTS, GROUP, OTHER = tuple(f"n{number}" for number in range(40)), 50, 1, 2
STORE = StoreLocation("memory://unused")
TABLE = Group(GROUP, "public", "t", "default", 1, ())


def made_sources() -> Sources:
    """Of every node objects with rows of GROUP, and one with rows of OTHER."""
    bases = [
        BaseSource(Source(f"{node}-{at}", node, number, 1, ""), {GROUP if at else OTHER: 1})
        for number, node in enumerate(NODES)
        for at in range(OBJECTS)
    ]
    return Sources(NODES, BaseSources.of(bases), (), frozenset(), {})


def test_every_object_is_loaded_once_and_a_job_has_those_of_many_nodes() -> None:
    sources, without = made_sources(), 3
    feeds = {
        number: Feed({number: LoadTarget(Node(node, "dbname=a"), {GROUP: TABLE}, "ledger")})
        for number, node in enumerate(NODES)
        if number != without
    }
    alone = dict.fromkeys(feeds, frozenset[int]())
    tasks = list(base_tasks(sources, alone, {}, feeds, STORE))
    keys = [task.base.source.key for task in tasks]
    assert len(keys) == len(set(keys))
    assert set(keys) == {one.source.key for one in sources.bases if GROUP in one.rows and one.source.number != without}
    # However few tasks a job has, they are of as many nodes.
    first = {task.base.source.node for task in islice(tasks, len(NODES) - 1)}
    assert first == set(NODES) - {NODES[without]}
