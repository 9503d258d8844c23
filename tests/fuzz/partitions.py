"""Detaching, attaching and replacing partitions."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.fuzz.maker import Maker
from tests.fuzz.names import quoted
from tests.fuzz.schemas import make_leaf, make_partitioned
from tests.fuzz.table_changes import replace_table


def alter_partition(maker: Maker) -> None:
    """Detach a partition, attach it again, or drop it and create another."""
    detached = [table for table in maker.tables if table.detached_from]
    if detached and maker.one_in(2):
        table = maker.draw(st.sampled_from(detached))
        maker.run(table.detached_from, table.shards)
        maker.tables.remove(table)
        return
    found = [table for table in maker.tables if table.leaves]
    if not found:
        make_partitioned(maker)
        return
    table = maker.draw(st.sampled_from(found))
    (leaf, bounds), *kept = table.leaves
    name = f"{quoted(table.schema)}.{quoted(leaf)}"
    if maker.one_in(3):
        maker.run(f"DROP TABLE {name}", table.shards)
        fresh = maker.name()
        make_leaf(maker, table, fresh, bounds, is_keyed=bool(table.key))
        replace_table(maker, table, replace(table, leaves=((fresh, bounds), *kept)))
        return
    maker.run(f"ALTER TABLE {table.sql} DETACH PARTITION {name}", table.shards)
    replace_table(maker, table, replace(table, leaves=tuple(kept)))
    attach = f"ALTER TABLE {table.sql} ATTACH PARTITION {name} {bounds}"
    maker.tables.append(replace(table, name=leaf, leaves=(), detached_from=attach, constraint="", primary=()))
