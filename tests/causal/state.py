"""The tables of the causal chains: read the state of all shards, and find violations of consistency.

A chain is a sequence of links. Link k is a parent on some shard A, a child that refers to it there, and the child's
twin on another shard B; the parent refers to the child or the twin of link k - 1, whichever is on A. So every link was
written by a client that had read the previous link, which foreign keys enforce. After a chain is trimmed at its old
end, its first parent refers to nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

SCHEMA = """
CREATE TABLE parent (id bigint PRIMARY KEY, chain int NOT NULL, link int NOT NULL, prev_child bigint, prev_twin bigint);
CREATE TABLE child (id bigint PRIMARY KEY, chain int NOT NULL, link int NOT NULL, parent bigint NOT NULL,
                    twin_shard int NOT NULL);
CREATE TABLE twin (id bigint PRIMARY KEY, chain int NOT NULL, link int NOT NULL, child_shard int NOT NULL);
ALTER TABLE parent ADD FOREIGN KEY (prev_child) REFERENCES child ON DELETE SET NULL,
                   ADD FOREIGN KEY (prev_twin) REFERENCES twin ON DELETE SET NULL;
ALTER TABLE child ADD FOREIGN KEY (parent) REFERENCES parent;
CREATE INDEX ON parent (prev_child);
CREATE INDEX ON parent (prev_twin);
CREATE INDEX ON child (parent)
"""
FOREIGN_KEYS = 3
# Before version 18, every constraint is enforced.
VALID_KEYS_QUERY = """
SELECT count(*) FROM pg_constraint AS k
 WHERE contype = 'f' AND convalidated AND coalesce((to_jsonb(k) ->> 'conenforced')::boolean, true)
"""

# Identifies a row of the fleet by its table, the number of its shard, and its id.
Row = tuple[str, int, Any]


class Parent(NamedTuple):
    shard: int
    id: int
    chain: int
    link: int
    prev_child: int | None
    prev_twin: int | None


class Child(NamedTuple):
    shard: int
    id: int
    chain: int
    link: int
    parent: int
    twin_shard: int


class Twin(NamedTuple):
    shard: int
    id: int
    chain: int
    link: int
    child_shard: int


@dataclass(frozen=True, slots=True)
class ChainState:
    """The rows of the chains on all shards, and the bank's transfers by shard and id."""

    parents: tuple[Parent, ...] = ()
    children: tuple[Child, ...] = ()
    twins: tuple[Twin, ...] = ()
    transfers: tuple[tuple[int, str], ...] = ()
    bad_keys: tuple[str, ...] = ()

    @property
    def rows(self) -> frozenset[Row]:
        tables = (
            ("parent", self.parents),
            ("child", self.children),
            ("twin", self.twins),
            ("transfer", self.transfers),
        )
        return frozenset((table, row[0], row[1]) for table, rows in tables for row in rows)


def create_chains(dsn: str) -> None:
    """Create the tables of the chains in one shard's database."""
    with psycopg.connect(dsn) as connection:
        connection.execute(SCHEMA)


def read_state(dsns: Sequence[str]) -> ChainState:
    """Read databases that nobody writes to; `dsns` are the DSNs of shards 0, 1, … in order."""
    parents: list[Parent] = []
    children: list[Child] = []
    twins: list[Twin] = []
    transfers: list[tuple[int, str]] = []
    bad_keys: list[str] = []
    for shard, dsn in enumerate(dsns):
        with psycopg.connect(dsn) as connection:
            # Read the rows themselves, not an index by which a foreign key may have been checked.
            connection.execute(
                "SET enable_indexscan = off; SET enable_indexonlyscan = off; SET enable_bitmapscan = off"
            )
            parents += [Parent(shard, *row) for row in connection.execute("TABLE parent")]
            children += [Child(shard, *row) for row in connection.execute("TABLE child")]
            twins += [Twin(shard, *row) for row in connection.execute("TABLE twin")]
            transfers += [(shard, row[0]) for row in connection.execute("SELECT id::text FROM transfer")]
            (valid,) = connection.execute(VALID_KEYS_QUERY).fetchone() or (0,)
            if valid != FOREIGN_KEYS:
                bad_keys.append(f"shard {shard} has {valid} valid foreign keys instead of {FOREIGN_KEYS}")
    return ChainState(tuple(parents), tuple(children), tuple(twins), tuple(transfers), tuple(bad_keys))


def find_faults(state: ChainState) -> list[str]:
    """Describe everything in `state` that is impossible in a consistent state of the fleet."""
    return [*state.bad_keys, *_dangling(state), *_torn(state), *_holes(state)]


def _dangling(state: ChainState) -> Iterator[str]:
    """Find references to a missing row of the same shard."""
    parents, children, twins = ({(row.shard, row.id) for row in rows} for rows in _tables(state))
    for child in state.children:
        if (child.shard, child.parent) not in parents:
            yield f"{child} has no parent"
    for parent in state.parents:
        if parent.prev_child is not None and (parent.shard, parent.prev_child) not in children:
            yield f"{parent} refers to a child that is not there"
        if parent.prev_twin is not None and (parent.shard, parent.prev_twin) not in twins:
            yield f"{parent} refers to a twin that is not there"


def _tables(state: ChainState) -> tuple[Iterable[Any], ...]:
    return state.parents, state.children, state.twins


def _torn(state: ChainState) -> Iterator[str]:
    """Find children without their twin on the other shard, and twins without their child."""
    children = {(row.id, row.chain, row.link, row.shard, row.twin_shard): row for row in state.children}
    twins = {(row.id, row.chain, row.link, row.child_shard, row.shard): row for row in state.twins}
    yield from (f"torn: {children[key]} has no twin" for key in sorted(children.keys() - twins.keys()))
    yield from (f"torn: {twins[key]} has no child" for key in sorted(twins.keys() - children.keys()))


def _holes(state: ChainState) -> Iterator[str]:
    """Find chains that are not a sequence of links that refer to their predecessor; the last may be only a parent."""
    parents: dict[int, list[Parent]] = defaultdict(list)
    links: dict[int, set[int]] = defaultdict(set)
    known = {("child", row.shard, row.id): (row.chain, row.link) for row in state.children}
    known |= {("twin", row.shard, row.id): (row.chain, row.link) for row in state.twins}
    for parent in state.parents:
        parents[parent.chain].append(parent)
    for chain, link in known.values():
        links[chain].add(link)
    for chain in sorted(parents.keys() | links.keys()):
        parent_of_link = {parent.link: parent for parent in parents[chain]}
        yield from _numbering_faults(chain, [parent.link for parent in parents[chain]], links[chain])
        for link in sorted(parent_of_link):
            parent = parent_of_link[link]
            before = [("child", parent.shard, parent.prev_child), ("twin", parent.shard, parent.prev_twin)]
            found = [known.get(row) for row in before if row[2] is not None]
            if found != ([] if link == min(parent_of_link) else [(chain, link - 1)]):
                yield f"hole: {parent} does not refer to link {link - 1} alone but to {found}"
    counted = Counter((row.chain, row.link) for row in state.children)
    yield from (f"chain {chain} has link {link} {n} times" for (chain, link), n in sorted(counted.items()) if n > 1)


def _numbering_faults(chain: int, of_parents: list[int], links: set[int]) -> Iterator[str]:
    first, last = min([*of_parents, *links]), max([*of_parents, *links])
    if sorted(of_parents) != list(range(first, last + 1)):
        yield f"hole: chain {chain} has parents at {sorted(of_parents)}, and links from {first} to {last}"
    whole = set(range(first, last + 1))
    if links not in (whole, whole - {last}):
        yield f"hole: chain {chain} has links {sorted(links)}, and parents from {first} to {last}"
