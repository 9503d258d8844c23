"""What somebody who may write to an encrypted store, and has no key, does to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import zstandard

from cutline.fleet.record import Record
from cutline.snapshots.records.documents import seal
from cutline.storage.encryption.encrypted_store import EncryptedStore, StoreKey
from tests.integration.encrypted_chain import NAME, EncryptedChain, contents, put
from tests.unit.made_archives import MadeEntry, made_body


def plant_ddl(chain: EncryptedChain) -> None:
    """Put an archive of the attacker's in the place of the DDL, as a store without encryption has it."""
    planted = made_body([MadeEntry("TABLE", statements="ALTER ROLE mallory SUPERUSER;\n")])
    for path in (chain.store / "snapshots" / NAME / "schema").rglob("archive-*"):
        path.write_bytes(zstandard.compress(planted))


def plant_commit(chain: EncryptedChain) -> None:
    """Replace the commit by one of the attacker's, intact but not encrypted."""
    commit = json.loads(chain.runs.fleet.store.open().read(f"snapshots/{NAME}/snapshot.json"))
    (chain.store / "snapshots" / NAME / "snapshot.json").write_bytes(seal(commit))


def move_commit(chain: EncryptedChain) -> None:
    increments = chain.store / "snapshots" / NAME / "increments"
    shutil.copy(increments / "0000000000000001.json", increments / "0000000000000002.json")


def move_object(chain: EncryptedChain) -> None:
    """Put an object of the standby's copy in the place of one of the primary's, which are restored."""
    one, other = sorted((chain.store / "snapshots" / NAME / "base").rglob("part-*"))[:2]
    shutil.copy(other, one)


def flip_bit(chain: EncryptedChain) -> None:
    path = sorted((chain.store / "snapshots" / NAME / "base").rglob("part-*"))[0]
    body = bytearray(path.read_bytes())
    body[0] ^= 1
    path.write_bytes(bytes(body))


def cut_commit(chain: EncryptedChain) -> None:
    path = chain.store / "snapshots" / NAME / "snapshot.json"
    path.write_bytes(path.read_bytes()[:-1])


ATTACKS = (plant_ddl, plant_commit, move_commit, move_object, flip_bit, cut_commit)


def planted_by_strangers(chain: EncryptedChain, key: str, record: Record) -> Iterator[None]:
    """Put the record into the store as who has no key writes it, then as who has a key of his own does."""
    stranger = EncryptedStore(chain.runs.fleet.store.open_raw(), lambda: StoreKey(bytes(32)))
    for body in (seal(record), stranger.encode(key, seal(record))):
        put(chain.store / key, body)
        before = contents(chain.store)
        yield
        assert before.items() <= contents(chain.store).items()
