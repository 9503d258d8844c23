"""Fleets whose stores are initialised, and chains of theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.store_identity import ensure_identity, read_identity
from cutline.storage.location import StoreLocation
from tests.unit import made_chains
from tests.unit.document_kinds import FLEET
from tests.unit.made_commits import commit, unused_url


def new_fleet(fleet: Fleet = FLEET) -> Fleet:
    """The fleet with an initialised store of its own."""
    found = replace(fleet, store=StoreLocation(unused_url()))
    ensure_identity(found.store.open(), found)
    return found


def unreachable_fleet(folder: Path) -> Fleet:
    """Write the file of a fleet with a store in the folder, whose only node can't be reached."""
    path = folder / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{folder}/store"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    return load_fleet(path)


def store_chain(fleet: Fleet, name: str, *taken_at: str) -> None:
    """Store a chain of this fleet."""
    fleet_id = read_identity(fleet.store.open(), fleet).fleet_id

    def of_fleet(number: int, chain: str) -> Commit:
        made = commit(number, chain)
        return structs.replace(made, fleet_id=fleet_id) if isinstance(made, FullSnapshot) else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_chains, "commit", of_fleet)
        made_chains.store_chain(fleet.store.open(), name, *taken_at)
