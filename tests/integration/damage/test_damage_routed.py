"""Damage where rows go to other targets than the shards: what is lost is named as without routes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from cutline.snapshots.ddl.dump import find_ddl
from tests.commands.in_process import run_here
from tests.integration.damage.copied_chain import NAME, CopiedChain
from tests.run.soak import first_of_each
from tests.stores.damage import flip_byte, remove


def into_one(copied: CopiedChain, folder: Path) -> list[str]:
    """The words that restore both shards into one database."""
    dsn = copied.target.primaries[0].dsn
    path = folder / "one.toml"
    path.write_text(f'name = "one"\nstore = "file://{copied.store}"\n\n[[node]]\nid = "t1"\ndsn = "{dsn}"\n')
    return ["restore", NAME, "--to", str(path), "--dry-run"]


@pytest.mark.parametrize(("shard", "damage"), first_of_each(product(["s1", "s2"], [flip_byte, remove])))
def test_damaged_ddl_of_a_source_says_what_is_lost(
    copied: CopiedChain, tmp_path: Path, shard: str, damage: Callable[[Path], None]
) -> None:
    key = find_ddl(copied.chain, shard).key
    copied.damage({key: damage})
    code, refused = run_here(copied.fleet, *into_one(copied, tmp_path))
    assert (code, refused["error"], refused["details"]["object"]) == (3, "object-damaged", key)
    assert f"increment 2 of {NAME} lacks DDL of {shard}" in refused["message"]
    assert refused["details"]["lost"] == [{"shard": shard, "what": "DDL", "partitions": None}]
    # Increment 1 has DDL of its own.
    assert refused["details"]["restorable"] == [0, 1]


def test_what_is_refused_with_routes_is_not_suggested(copied: CopiedChain, tmp_path: Path) -> None:
    """A segment of increment 2 is missing, which the standby has, and then the base copy, too."""
    copied.damage({copied.segment("s1", 2): remove})
    code, refused = run_here(copied.fleet, *into_one(copied, tmp_path))
    assert (code, refused["details"].get("restorable_with_backup_copies")) == (3, [0, 1]), refused
    assert "--use-backup-copies" not in refused["hint"]
    assert (
        f"to restore the newest: snapshot --fleet {copied.fleet.path} restore {NAME} --increment 1" in refused["hint"]
    )
    copied.damage({copied.base("s1"): remove})
    code, refused = run_here(copied.fleet, *into_one(copied, tmp_path))
    assert (code, refused["details"].get("restorable_with_backup_copies")) == (3, []), refused
    assert "--use-backup-copies" not in refused["hint"]
    assert "no increment can be restored" in refused["hint"]
