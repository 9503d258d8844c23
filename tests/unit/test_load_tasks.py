"""The load tasks: one for each base object with wanted rows, and those for images that the driver folded."""

from __future__ import annotations

from itertools import islice

import pyarrow as pa
import pytest

import cutline.restore.rows.jobs
from cutline.columns.row_batches import from_stream
from cutline.fleet.config import Node
from cutline.nodes.groups import Group
from cutline.restore.rows.jobs import _image_tasks, _images_for, base_tasks
from cutline.restore.rows.load import Feed, LoadError, LoadTarget
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, Source, Sources
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


def made_images(rows: list[tuple[int, int, bytes]]) -> pa.Table:
    """Images of (node, group, row), whose keys are their rows."""
    columns = [[row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows], [row[2] for row in rows]]
    schema = pa.schema([("node", pa.int32()), ("group", pa.int32()), ("row", pa.binary()), ("key", pa.binary())])
    return pa.table(columns, schema=schema)


def feed_to(node: str) -> Feed:
    return Feed({0: LoadTarget(Node(node, "dbname=a"), {GROUP: TABLE}, "ledger")})


def test_images_are_divided_by_bytes_and_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.restore.rows.jobs, "IMAGES_PER_TASK", 3)
    monkeypatch.setattr(cutline.restore.rows.jobs, "IMAGE_BYTES_PER_TASK", 10)
    lines = [b"12345", b"12345", b"1", b"1", b"1", b"1", b"long" * 5, b"1"]
    images = made_images([(node, GROUP, line) for node in (1, 3) for line in lines])
    tasks = list(_image_tasks(images, {1: feed_to("a"), 3: feed_to("b")}))
    names = [f"images-{node}-{start}" for node in (1, 3) for start in (0, 2, 5, 6, 7)]
    assert [task.name for task in tasks] == names
    assert [row for task in tasks for row in from_stream(task.stream)["row"].to_pylist()] == lines * 2
    assert [task.source for task in tasks] == [1] * 5 + [3] * 5


def test_an_image_that_lacks_a_value_ends_the_load_before_anything_is_loaded() -> None:
    images = made_images([(0, PROBLEM, b"key"), (1, GROUP, b"x")])
    assert len(_images_for({1: feed_to("b")}, images)) == 1
    with pytest.raises(LoadError, match="node a: the row with key b'key' can't be completed"):
        _images_for({0: feed_to("a"), 1: feed_to("b")}, images)
