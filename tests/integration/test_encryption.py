"""An encrypted store: nothing in it can be read, changed, moved or planted without the key.

The attacker of these tests may write to the store, and knows everything but the key.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, load_fleet
from snapshots.records.documents import seal
from snapshots.records.operation_records import operation_key
from storage.digest import digest
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.unit.made_archives import MadeEntry, made_body

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "sealed"
SECRET = "a-value-that-stands-in-one-row"
# What would be found in the store if something were not encrypted: names, rows, DDL, JSON, Parquet, zstd.
PLAINTEXT = [
    b"secret_table", SECRET.encode(), b"CREATE TABLE", b'"schema"', b"cutline/", b"PAR1", b"\x28\xb5\x2f\xfd",
]  # fmt: skip
ENCRYPTED_END = b"cutline\x01"


@dataclass(frozen=True, slots=True)
class EncryptedChain:
    """A full snapshot and two increments of one shard with a standby, in an encrypted folder."""

    runs: Runs
    folder: Path
    states: tuple[dict[str, bytes], ...]

    @property
    def store(self) -> Path:
        return self.folder / "store"


@pytest.fixture(scope="module")
def chain(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EncryptedChain]:
    folder = tmp_path_factory.mktemp("encrypted")
    key = folder / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    more = f"[encryption]\nkey_file = {json.dumps(str(key))}\n"
    with database_on(shared_fleet, "sealed", folder, more=more) as fleet, dropping_slots(fleet):
        dsn, runs = fleet.primaries[0].dsn, Runs(fleet, Ready(spark))
        execute(dsn, "CREATE TABLE secret_table (id int PRIMARY KEY, value text)")
        execute(dsn, "INSERT INTO secret_table SELECT n, 'value ' || n FROM generate_series(1, 5000) n")
        runs.init()
        states = []
        for number in range(3):
            execute(dsn, f"INSERT INTO secret_table VALUES ({-number}, '{SECRET}')")
            states.append(sorted_copies(dsn))
            runs.increment(NAME) if number else runs.full(NAME)
        yield EncryptedChain(runs, folder, tuple(states))


@pytest.fixture
def copied(chain: EncryptedChain, tmp_path: Path) -> EncryptedChain:
    """A copy of the store that a test may attack."""
    shutil.copytree(chain.store, tmp_path / "store")
    text = chain.runs.fleet.path.read_text().replace(f"file://{chain.store}", f"file://{tmp_path}/store")
    (tmp_path / "fleet.toml").write_text(text)
    return EncryptedChain(replace(chain.runs, fleet=load_fleet(tmp_path / "fleet.toml")), tmp_path, chain.states)


def files(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file())


def without_key(fleet: Fleet, folder: Path) -> Fleet:
    path = folder / "keyless.toml"
    path.write_text(re.sub(r"\[encryption\]\nkey_file = .*\n", "", fleet.path.read_text()))
    return load_fleet(path)


@pytest.mark.parametrize("increment", [0, 2])
def test_an_encrypted_chain_is_valid_and_restores_every_row(chain: EncryptedChain, increment: int) -> None:
    assert chain.runs.check_one(NAME, increment).conflicts == []
    chain.runs.restore(NAME, chain.runs.fleet, increment)
    assert sorted_copies(chain.runs.fleet.primaries[0].dsn) == chain.states[increment]


def test_nothing_in_the_store_can_be_read(chain: EncryptedChain) -> None:
    found = files(chain.store)
    kinds = {path.relative_to(chain.store).parts[0] for path in found}
    assert kinds == {"fleet.json", "snapshots", "operations", "baselines", "keys"}
    for path in found:
        body = path.read_bytes()
        if path.parent.name == "keys":
            assert bytes.fromhex("11" * 32) not in body
            continue
        assert body.endswith(ENCRYPTED_END), path
        assert [text for text in PLAINTEXT if text in body.removesuffix(ENCRYPTED_END)] == [], path


def test_commits_have_the_digests_of_what_is_stored(chain: EncryptedChain) -> None:
    _, shown = run_here(chain.runs.fleet, "show", NAME)
    store = chain.runs.fleet.store.open()
    for number in range(3):
        key = f"snapshots/{NAME}/" + (f"increments/{number:016d}.json" if number else "snapshot.json")
        commit = json.loads(store.read(key))
        listed = commit.get("objects", []) + [one for some in commit["segments"].values() for one in some]
        assert listed
        for one in listed:
            assert digest((chain.store / one["key"]).read_bytes()) == one["digest"]
    assert shown["name"] == NAME


def test_without_a_key_every_command_says_that_the_store_is_encrypted(chain: EncryptedChain, tmp_path: Path) -> None:
    keyless = without_key(chain.runs.fleet, tmp_path)
    for words in (["list"], ["show", NAME], ["create", "other"], ["check"], ["restore", NAME], ["gc"], ["init"]):
        code, document = run_here(keyless, *words)
        assert (code, document["error"]) == (3, "store-encrypted"), words
        assert "[encryption]" in document["hint"]


def test_another_key_opens_nothing(copied: EncryptedChain) -> None:
    other = copied.folder / "other"
    other.write_text("22" * 32)
    other.chmod(0o600)
    text = copied.runs.fleet.path.read_text()
    key = next(line for line in text.splitlines() if line.startswith("key_file"))
    copied.runs.fleet.path.write_text(text.replace(key, f"key_file = {json.dumps(str(other))}"))
    code, document = run_here(load_fleet(copied.runs.fleet.path), "list")
    assert (code, document["error"]) == (3, "store-key")


def test_the_key_rotates_and_the_chain_stays(copied: EncryptedChain) -> None:
    fleet, new = copied.runs.fleet, copied.folder / "new"
    before = {path: path.read_bytes() for path in files(copied.store)}
    (old,) = run_here(fleet, "key", "list")[1]["keys"]
    assert run_here(fleet, "key", "new", str(new))[0] == 0
    assert new.stat().st_mode & 0o777 == 0o600
    assert run_here(fleet, "key", "new", str(new))[1]["error"] == "key-file-exists"
    assert run_here(fleet, "key", "add", "--key-file", str(new))[0] == 0
    text = fleet.path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("key_file"))
    rotated = fleet.path.with_name("rotated.toml")
    rotated.write_text(text.replace(line, f"key_file = {json.dumps(str(new))}"))
    assert run_here(load_fleet(rotated), "key", "remove", old["key"])[0] == 0
    assert run_here(fleet, "list")[1]["error"] == "store-key"
    assert [one["name"] for one in run_here(load_fleet(rotated), "list")[1]["snapshots"]] == [NAME]
    changed = {path for path in files(copied.store) if path.read_bytes() != before.get(path)}
    assert [path.relative_to(copied.store).parts[0] for path in changed] == ["keys"]


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


@pytest.mark.parametrize("attack", [plant_ddl, plant_commit, move_commit, move_object, flip_bit, cut_commit])
def test_check_finds_what_was_planted_and_restore_refuses_it(
    copied: EncryptedChain, attack: Callable[[EncryptedChain], None], spark: SparkSession
) -> None:
    attack(copied)
    code, document = run_here(copied.runs.fleet, "check", NAME, spark=spark)
    assert (code, document["result"]) == (1, "conflicts")
    code, document = run_here(copied.runs.fleet, "restore", NAME, "--replace", spark=spark)
    assert code == 3, document
    assert document["hint"]


def test_documents_that_are_not_encrypted_change_nothing(copied: EncryptedChain) -> None:
    """A tombstone, a prune mark and an outcome: each would remove something if it were believed."""
    fleet = copied.runs.fleet
    before = {path for path in files(copied.store) if path.suffix == ".parquet"}
    mark: dict[str, Any] = {"schema": "cutline/deleted/1", "snapshot": NAME, "at": "2026-01-01T00:00:00Z"}
    for place in (f"deleted/{NAME}.json", f"snapshots/{NAME}/only-full.json"):
        path = copied.store / place
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(seal(mark))
    (operation,) = {path.parent.name for path in copied.store.glob("snapshots/*/schema/*/*/*")}
    (copied.store / operation_key(operation, "outcome")).write_bytes(
        seal({"schema": "cutline/outcome/1", "result": "failed"})
    )
    for words in (["gc", "--grace", "0s"], ["prune"]):
        code, _ = run_here(fleet, *words)
        assert code in (0, 2, 3), words
    assert {path for path in files(copied.store) if path.suffix == ".parquet"} == before


def test_a_store_of_the_attackers_is_not_taken_for_ours(copied: EncryptedChain) -> None:
    """The whole store is replaced by one without encryption, and by one encrypted with another key."""
    shutil.rmtree(copied.store)
    keyless = without_key(copied.runs.fleet, copied.folder)
    assert run_here(keyless, "init")[0] == 0
    for words in (["list"], ["create", "other"], ["init"]):
        code, document = run_here(copied.runs.fleet, *words)
        assert (code, document["error"]) == (3, "store-key"), words
