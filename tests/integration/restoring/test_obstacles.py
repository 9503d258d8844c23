"""Everything that keeps a restore from its targets is named at once, each with its own hint, and nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope, TableMove
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import SnapshotError
from tests.integration.refusing import NoSpark, execute
from tests.integration.restoring.target_place import DATABASE, NAME, Place, hidden
from tests.stores.listed import base_objects_of

EXISTS = ("restore to other servers with --to FILE, or set the existing databases aside with --replace",)


@contextmanager
def existing(place: Place, *shards: str) -> Iterator[None]:
    servers = [with_database(node, "postgres").dsn for node in place.target.primaries if node.id in shards]
    for server in servers:
        execute(server, f"CREATE DATABASE {DATABASE}")
    try:
        yield
    finally:
        for server in servers:
            execute(server, f"DROP DATABASE {DATABASE}")


def refusals(place: Place, target: Fleet, request: RestoreRequest) -> SnapshotError:
    """The error of a restore, which is that of its dry run; neither changes anything."""
    before = place.databases()
    with pytest.raises(SnapshotError) as previewed:
        preview_restore(plan_restore(place.fleet, target, request), Silent())
    with pytest.raises(SnapshotError) as restored:
        restore_fleet(plan_restore(place.fleet, target, request), NoSpark(), Silent())
    assert place.databases() == before
    error, other = previewed.value, restored.value
    assert (error.slug, error.message, error.hint) == (other.slug, other.message, other.hint)
    assert error.details == other.details
    return error


def test_obstacles_of_the_store_and_of_all_nodes_are_named_at_once(place: Place) -> None:
    lost = next(one.key for one in base_objects_of(read_chain(place.fleet.store.open(), NAME), "s2"))
    ends = tuple(
        replace(node, dsn=node.dsn.replace(f"/{node.id}&", "/nowhere&")) if node.id == "s3" else node
        for node in place.target.nodes
    )
    with existing(place, "s1", "s2"), hidden(place, lost):
        error = refusals(place, replace(place.target, nodes=ends), RestoreRequest(NAME))
    assert (error.slug, error.exit_code) == ("obstacles", 3)
    obstacles = error.details["obstacles"]
    assert isinstance(obstacles, list)
    assert [(one["node"], one["error"]) for one in obstacles] == [
        ("s3", "node-unreachable"),
        ("s2", "object-damaged"),
        ("s1", "target-exists"),
        ("s2", "target-exists"),
    ]
    assert lost in obstacles[1]["message"]
    assert error.message.startswith("4 obstacles: (1) node s3: ")
    assert "; (3) node s1: database shop already exists; (4) node s2: database shop already exists" in error.message
    lines = error.hint.split("\n")
    assert lines[0].startswith("for 1: check that the server is running")
    assert lines[1] == "for 2:"
    assert lines[-1] == f"for 3, 4: {EXISTS[0]}"


def test_a_single_obstacle_is_an_error_of_its_own(place: Place) -> None:
    with existing(place, "s2"):
        error = refusals(place, place.target, RestoreRequest(NAME))
    assert (error.slug, error.message) == ("target-exists", "node s2: database shop already exists")
    assert (error.hint,) == EXISTS
    assert error.details == {"node": "s2", "database": DATABASE}


def test_some_tables_into_a_database_that_exists_lead_to_its_own_tables(place: Place) -> None:
    request = RestoreRequest(NAME, 0, groups=("public.item", "public.l*"), create_roles=True)
    with existing(place, "s2"):
        error = refusals(place, place.target, request)
    assert (error.slug, error.message) == ("target-exists", "node s2: database shop already exists")
    command = f"snapshot restore {NAME} --group public.item --group 'public.l*' --data-only --increment 0"
    assert error.hint.split("\n")[0] == f"to load the rows into its existing tables, which must be empty: {command}"
    assert "--replace" not in error.hint
    # Under another name a table can't be filled where it is, and --replace would leave the other tables empty.
    moved = RestoreRequest(NAME, scope=RestoreScope(moves=(TableMove("public", "item", "public", "item_old"),)))
    with existing(place, "s2"):
        assert refusals(place, place.target, moved).hint == "restore to other servers with --to FILE"


def test_an_obstacle_that_all_nodes_have_is_named_once_with_the_nodes(place: Place) -> None:
    scope = RestoreScope(moves=(TableMove("public", "item", "public", "log"),))
    error = refusals(place, place.target, RestoreRequest(NAME, scope=scope))
    taken = "--group public.item=public.log: the name public.log is already taken by table"
    assert (error.slug, error.message) == ("table-in-the-way", f"{taken} (on nodes s1, s2, s3)")
    assert error.hint == "choose a different name or schema"
    obstacles = error.details["obstacles"]
    assert isinstance(obstacles, list)
    assert [(one["node"], one["message"]) for one in obstacles] == [(shard, taken) for shard in ("s1", "s2", "s3")]


def test_nodes_that_can_not_be_reached_are_named_at_once(place: Place) -> None:
    ends = tuple(replace(node, dsn=node.dsn.replace(f"/{node.id}&", "/nowhere&")) for node in place.target.nodes)
    error = refusals(place, replace(place.target, nodes=ends), RestoreRequest(NAME))
    assert (error.slug, error.exit_code) == ("node-unreachable", 6)
    assert [text in error.message for text in ("(1) node s1: ", "(2) node s2: ", "(3) node s3: ")] == [True] * 3


@pytest.mark.parametrize("scope", [RestoreScope(), RestoreScope(data_only=True)], ids=["databases", "data-only"])
def test_nodes_that_are_one_database_are_named(place: Place, scope: RestoreScope) -> None:
    """Under two addresses: their own locks are not taken for those of another command."""
    first, second, third = place.target.primaries
    same = replace(second, dsn=first.dsn.replace(f"/{first.id}&", f"/../{Path(first_folder(first)).name}/{first.id}&"))
    error = refusals(place, replace(place.target, nodes=(first, same, third)), RestoreRequest(NAME, scope=scope))
    found = error.details.get("obstacles", [error.details | {"message": error.message}])
    assert isinstance(found, list)
    assert ("s2", "nodes s1 and s2 refer to the same database on the same server") in [
        (one["node"], one["message"]) for one in found
    ]


def first_folder(node: Node) -> str:
    """The folder of the folder of the node's socket."""
    return str(conninfo_to_dict(node.dsn)["host"]).rpartition("/")[0]


def test_a_missing_segment_is_found_by_its_name_and_a_smaller_one_by_its_size(place: Place) -> None:
    (lost, *_) = [one.key for one in read_chain(place.fleet.store.open(), NAME).segments("s2") if one.changes]
    with hidden(place, lost):
        for body in (None, b"too short"):
            file = Path(place.fleet.store.open().url.removeprefix("file://")) / lost
            if body is not None:
                file.write_bytes(body)
            error = refusals(place, place.target, RestoreRequest(NAME))
            assert (error.slug, error.details["object"]) == ("object-damaged", lost)
            file.unlink(missing_ok=True)
    preview_restore(plan_restore(place.fleet, place.target, RestoreRequest(NAME)), Silent())
