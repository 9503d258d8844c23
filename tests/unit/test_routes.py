"""Routes: what users may write, and where PostgreSQL's hash functions lead."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from cutline.columns.bytes_column import from_list
from cutline.columns.fields import field_of, find_nulls, read_integers, read_texts, read_uuids
from cutline.columns.hashing import hash_integers, hash_values
from cutline.fleet.config import Fleet, Node
from cutline.nodes.groups import Group
from cutline.restore.plan.topology import Topology, keeps_foreign_key, plan_topology
from cutline.restore.scope.table_routes import (
    Route,
    RouteKind,
    RowWithoutTargetError,
    SourceRoutes,
    TableRoute,
    parse_route,
    place_rows,
)
from cutline.restore.targets.chain_ids import in_ids_of, other_ids
from cutline.storage.errors import UsageError
from tests.unit.made_chains import FLEET
from tests.unit.made_commits import memory

# What hashint8, hashtext and uuid_hash of a PostgreSQL 18 server return.
INTEGERS = {
    0: -272711505,
    1: -1905060026,
    -1: 385747274,
    10000: 1377887537,
    2147483647: -96758253,
    -2147483648: -1524351049,
    9223372036854775807: -1524351049,
    -9223372036854775808: -96758253,
}
TEXTS = {
    "": -1477818771,
    "a": 1075015857,
    "account": 2019105799,
    "exactly12byt": 804910449,
    "thirteen byte": -1367827268,
    "ß€😀": -620042957,
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx": 1174826790,
}
UUIDS = {"00000000-0000-0000-0000-000000000000": 1353656403, "123e4567-e89b-12d3-a456-426614174000": 1944658063}


@pytest.mark.parametrize(
    ("word", "route"),
    [
        ("public.account=hash(id)", Route("public.account", "hash(id)", RouteKind.HASH, "id")),
        ("*.a=b=range( id , -5, 10 )", Route("*.a=b", "range( id , -5, 10 )", RouteKind.RANGE, "id", (-5, 10))),
        ('s."a.b"=column("odd ""name""")', Route('s."a.b"', 'column("odd ""name""")', RouteKind.COLUMN, 'odd "name"')),
        ("public.*=node('t 1')", Route("public.*", "node('t 1')", RouteKind.NODE, node="t 1")),
        ("public.rate=all", Route("public.rate", "all", RouteKind.ALL)),
    ],
)
def test_routes_are_read(word: str, route: Route) -> None:
    assert parse_route(word) == route


@pytest.mark.parametrize(
    "word",
    [
        "public.account", "=hash(id)", "public.account=hash()", "public.account=hash(id, 2)", "public.account=id",
        "public.account=range(id)", "public.account=range(id, 5, 5)", "public.account=range(id, 5, 3)",
        "public.account=range(id, 9223372036854775808)", "public.account=node(t1)", "public.account=all()",
        "public.account=hash(id); DROP",
    ],
)  # fmt: skip
def test_what_is_no_route_is_refused(word: str) -> None:
    with pytest.raises(UsageError):
        parse_route(word)


def test_hashes_are_those_of_postgresql() -> None:
    integers = hash_integers(np.array(list(INTEGERS), np.int64))
    assert integers.view(np.int32).tolist() == list(INTEGERS.values())
    assert hash_values(from_list([one.encode() for one in TEXTS])).view(np.int32).tolist() == list(TEXTS.values())
    uuids = read_uuids(from_list([one.encode() for one in UUIDS]))
    assert hash_values(uuids).view(np.int32).tolist() == list(UUIDS.values())


def test_fields_are_cut_out_and_read_as_copy_writes_them() -> None:
    lines = from_list([b"1\ta\\tb\t\\N\n", b"-20\t\\\\\\\\n\\n\tx\n", b"300\t\t\\\\N\n"])
    assert read_integers(field_of(lines, 3, 0)).tolist() == [1, -20, 300]
    texts = read_texts(field_of(lines, 3, 1))
    assert [bytes(texts.part(slice(n, n + 1)).data) for n in range(3)] == [b"a\tb", b"\\\\n\n", b""]
    assert find_nulls(field_of(lines, 3, 2)).tolist() == [True, False, False]
    assert field_of(from_list([b"", b"k"]), 1, 0).lengths.tolist() == [0, 1]
    with pytest.raises(ValueError, match="some of its rows have more or fewer"):
        field_of(lines, 2, 0)


def test_rows_and_routes_may_name_a_target_by_each_of_its_ids() -> None:
    rows = pa.RecordBatch.from_pydict(
        {
            "group": pa.array([7] * 4, pa.int32()),
            "key": pa.array([b""] * 4, pa.binary()),
            "row": pa.array([b"t2\n", b"t1\n", b"east\n", b"t2\n"], pa.binary()),
        }
    )
    table = TableRoute("public.said", 0, RouteKind.COLUMN, "column(region)", 0, 1, "region", type="text")
    routes = SourceRoutes(
        "a", is_first=True, targets=("t1", "t2"), by_group={7: table, 8: table}, others={"east": "t1"}
    )
    assert place_rows(rows, routes.select([7])).tolist() == [1, 0, 0, 1]
    with pytest.raises(RowWithoutTargetError, match="region = east"):
        place_rows(rows, structs.replace(routes, others={}))
    group = Group(1, "public", "seen", "full", 0, ())
    (found,) = plan_topology(["a"], ["t1", "t2"], [group], ["*=node('east')"], {"east": "t1"}).routes.values()
    assert found.target == 0


def renamed_fleet(*ids: str) -> Fleet:
    nodes = tuple(Node(node, f"dbname={node}", None) for node in ids)
    return replace(FLEET, nodes=nodes)


@pytest.mark.parametrize(
    ("listed", "nodes", "expected", "others"),
    [
        (("s1", "s3"), ("east",), ("s3",), {"east": "s3"}),
        (("s1", "s3"), ("s3",), ("s3",), {"east": "s3"}),
        (("s1", "east"), ("east",), ("s3",), {"east": "s3"}),
        (("s1", "east"), ("s3",), ("s3",), {"east": "s3"}),
        # The file's own ids mean its own nodes.
        (("s3", "east"), ("east",), ("east",), {}),
    ],
)
def test_a_node_is_meant_by_either_id(
    monkeypatch: pytest.MonkeyPatch,
    listed: tuple[str, ...],
    nodes: tuple[str, ...],
    expected: tuple[str, ...],
    others: dict[str, str],
) -> None:
    monkeypatch.setattr("cutline.restore.targets.chain_ids.read_renamed", lambda *_: {"s3": "east"})
    target, chosen = in_ids_of(memory(), "chain", renamed_fleet(*listed), nodes, ("s1", "s3"))
    assert chosen == expected
    assert other_ids(memory(), "chain", target) == others


def route(table: str, number: int, kind: RouteKind, column: str = "", type_: str = "bigint") -> TableRoute:
    return TableRoute(f"public.{table}", number, kind, "", 1, 3, column, type=type_)


ROUTES = {
    "public.parent": route("parent", 0, RouteKind.HASH, "id"),
    "public.child": route("child", 1, RouteKind.HASH, "parent", "integer"),
    "public.other": route("other", 2, RouteKind.HASH, "parent", "uuid"),
    "public.everywhere": route("everywhere", 3, RouteKind.ALL),
    "public.one": route("one", 4, RouteKind.NODE),
    "public.alone": route("alone", 5, RouteKind.NODE),
}


def key(table: str, columns: str, other: str, others: str, more: str = "") -> str:
    return (
        f'ALTER TABLE ONLY "public"."{table}"\n    ADD CONSTRAINT "FOREIGN KEY (""" FOREIGN KEY ({columns})'
        f' REFERENCES "public"."{other}"({others}){more};'
    )


@pytest.mark.parametrize(
    ("statement", "is_kept"),
    [
        (key("child", '"parent"', "parent", '"id"'), True),
        (key("child", '"a", "parent"', "parent", '"b", "id"', " ON DELETE CASCADE"), True),
        (key("child", '"a", "parent"', "parent", '"id", "b"'), False),
        (key("other", '"parent"', "parent", '"id"'), False),
        (key("child", '"anything"', "everywhere", '"id"'), True),
        (key("everywhere", '"parent"', "parent", '"id"'), False),
        (key("one", '"a"', "alone", '"id"'), True),
        (key("child", '"parent"', "one", '"id"'), False),
        (key("partitioned", '"parent"', "parent", '"id"'), False),
        (key("child", '"parent", PERIOD "at"', "parent", '"id", PERIOD "at"'), False),
    ],
)
def test_foreign_keys_stay_where_both_rows_are_on_one_target(statement: str, *, is_kept: bool) -> None:
    assert keeps_foreign_key(Topology(("a",), ("t1", "t2"), ROUTES), statement) == is_kept
    assert keeps_foreign_key(Topology(("a",), ("t1",), ROUTES), statement)
