"""An encrypted store: nothing in it can be read, changed, moved or planted without the key.

The attacker of these tests may write to the store, and knows everything but the key.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from cutline.cli.main import COMMANDS
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.record import Time
from cutline.nodes.lock import lock_fleet
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.records.documents import base_prefix, seal
from cutline.snapshots.records.operation_records import Outcome, operation_key
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.tombstones import DELETED, ONLY_FULL, Mark, RestorePoint
from cutline.storage.digest import digest
from cutline.storage.ids import new_operation_id
from cutline.wal.drain.slots import slot_name
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.encrypted_attacks import ATTACKS, planted_by_strangers
from tests.integration.encrypted_chain import (
    NAME,
    EncryptedChain,
    contents,
    files,
    in_plain,
    put,
    with_key,
    without_key,
)
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.run.soak import first
from tests.stores.damage import flip_byte

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "a-value-that-stands-in-one-row"
# What would be found in the store if something were not encrypted: names, rows, DDL, JSON, Parquet, zstd.
PLAINTEXT = [
    b"secret_table", SECRET.encode(), b"CREATE TABLE", b'"schema"', b"cutline/", b"PAR1", b"\x28\xb5\x2f\xfd",
]  # fmt: skip
ENCRYPTED_END = b"cutline\x01"
OPENING_COMMANDS = [
    ["init"], ["create", "other"], ["restore", NAME], ["check"], ["repair", NAME, "--yes"], ["list"], ["show", NAME],
    ["delete", NAME, "--force", "--yes"],
    ["drill", NAME],
    ["copy", "--all", "--to", "/nowhere"], ["merge", NAME], ["keep", NAME], ["end", NAME, "--yes"],
    ["prune", "--keep-last", "9", "--yes"], ["gc", "--yes"], ["status"], ["history"], ["report"], ["cancel", "--all"],
    ["watch"], ["wait", "20261120T000000Z-000000000a"],
]  # fmt: skip


@pytest.fixture(scope="module")
def chain(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EncryptedChain]:
    folder = tmp_path_factory.mktemp("encrypted")
    key = folder / "key"
    key.write_text("11" * 32)
    key.chmod(0o600)
    more = f'[encryption]\nkey_file = {json.dumps(str(key))}\n[watch]\nevery = "1h"\n'
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


@pytest.mark.parametrize("increment", first([0, 2]))
def test_an_encrypted_chain_is_valid_and_restores_every_row(chain: EncryptedChain, increment: int) -> None:
    assert chain.runs.check_one(NAME, increment).conflicts == []
    chain.runs.restore(NAME, chain.runs.fleet, increment)
    assert sorted_copies(chain.runs.fleet.primaries[0].dsn) == chain.states[increment]


def test_a_restore_and_a_drill_of_an_encrypted_store_name_what_is_damaged(
    copied: EncryptedChain, spark: SparkSession
) -> None:
    """Whole, it is drilled; without an object of increment 2, what that lacks is named."""
    fleet = copied.runs.fleet
    with fleet.path.open("a") as file:
        file.write(
            '\n[[drill.assertion]]\nnode = "s1"\nsql = "SELECT count(*) > 5000 FROM secret_table"\nexpected = true\n'
        )
    code, document = run_here(fleet, "drill", NAME, spark=spark)
    assert (code, document["result"]) == (0, "holds"), document
    last = read_chain(fleet.store.open(), NAME).last
    key = max(last.segments["s1"], key=lambda one: one.size).key
    flip_byte(copied.store / key)
    for words, lost in (([], True), (["--increment", "1"], False)):
        code, document = run_here(fleet, "drill", NAME, *words, spark=spark)
        assert code == (3 if lost else 0), document
        if lost:
            assert (document["error"], document["details"]["object"]) == ("object-damaged", key)
            assert "increment 2 of sealed lacks" in document["message"]
            assert document["details"]["restorable"] == [0, 1]
    (copied.store / key).unlink()
    code, document = run_here(fleet, "restore", NAME, "--replace", "--dry-run")
    assert (code, document["error"], document["details"]["object"]) == (3, "object-damaged", key)
    assert "public.secret_table" in document["message"]


def test_a_check_rests_on_records_that_only_the_key_could_write(copied: EncryptedChain, spark: SparkSession) -> None:
    """Bit rot in an object that the record covers is found when it is reread."""
    fleet = copied.runs.fleet
    run_here(fleet, "check", NAME, "--increment", "1", spark=spark)
    (snapshot,) = run_here(fleet, "check", NAME, "--since-last")[1]["snapshots"]
    assert (snapshot["increment"], snapshot["conflicts"]) == (2, [])
    assert snapshot["rests_on"]["objects"] > 0
    base = next(path for path in files(copied.store) if "/base/" in path.as_posix())
    flip_byte(base)
    assert run_here(fleet, "check", NAME, "--since-last")[1]["snapshots"][0]["conflicts"] == []
    _, reread = run_here(fleet, "check", NAME, "--subset", "1/1")
    (conflict,) = reread["snapshots"][0]["conflicts"]
    assert (conflict["kind"], conflict["object"]) == ("digest", base.relative_to(copied.store).as_posix())


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


def test_without_a_key_every_command_that_opens_the_store_says_that_it_is_encrypted(copied: EncryptedChain) -> None:
    keyless, before = without_key(copied.runs.fleet, copied.folder), contents(copied.store)
    # The last three look at the targets first, where no restore is unfinished here.
    others = {"key", "resume", "cluster", "demo", "restore-resume", "restore-abandon", "restore-discard"}
    assert {words[0] for words in OPENING_COMMANDS} == COMMANDS.keys() - others
    for words in OPENING_COMMANDS:
        code, document = run_here(keyless, *words)
        assert (code, document.get("error")) == (3, "store-encrypted"), words
        assert "[encryption]" in document["hint"]
    assert contents(copied.store) == before


def test_without_a_key_no_key_is_listed_and_the_fleet_is_resumed(chain: EncryptedChain, tmp_path: Path) -> None:
    """What a terminal snapshot changed is recorded on the nodes: a fleet accepts writes again without the store."""
    keyless = without_key(chain.runs.fleet, tmp_path)
    code, document = run_here(keyless, "key", "list")
    assert (code, document.get("error")) == (2, "encryption-key")
    assert "[encryption]" in document["message"]
    code, document = run_here(keyless, "resume")
    assert (code, document.get("asked"), document.get("nodes")) == (0, ["s1"], [])


def test_another_key_opens_nothing(copied: EncryptedChain) -> None:
    code, document = run_here(with_key(copied, "22" * 32), "list")
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


@pytest.mark.parametrize("attack", ATTACKS)
def test_check_finds_what_was_planted_and_restore_refuses_it(
    copied: EncryptedChain, attack: Callable[[EncryptedChain], None], spark: SparkSession
) -> None:
    attack(copied)
    code, document = run_here(copied.runs.fleet, "check", NAME, spark=spark)
    assert (code, document["result"]) == (1, "conflicts")
    code, document = run_here(copied.runs.fleet, "restore", NAME, "--replace", "--yes", spark=spark)
    assert code == 3, document
    assert document["hint"]


def collect(fleet: Fleet, *options: str) -> dict[str, str]:
    """The objects that gc removes, and why."""
    code, document = run_here(fleet, "gc", "--yes", "--grace", "0s", *options)
    assert code == 0, document
    return {one["object"]: one["why"] for one in document["garbage"]}


@pytest.mark.parametrize(
    ("kind", "removed", "refused"),
    [
        (DELETED, "snapshot.json", "manifest"),
        (ONLY_FULL, "increments/0000000000000001.json", "last-snapshot"),
    ],
)
def test_a_mark_that_is_not_encrypted_removes_nothing(
    copied: EncryptedChain, kind: Literal["cutline/deleted/1", "cutline/only-full/1"], removed: str, refused: str
) -> None:
    """A tombstone and a prune mark, which gc and prune believe in the same store without encryption."""
    fleet, at = copied.runs.fleet, Time("2026-01-01T00:00:00.000Z")
    chain = read_chain(fleet.store.open(), NAME).full.chain
    mark = Mark(
        kind, NAME, new_operation_id(datetime.fromisoformat(at)), at, "ops@db7:1", chain, (slot_name(chain),),
        tuple(node.id for node in fleet.nodes), (RestorePoint(1, at, at), RestorePoint(2, at, at)), 7, 7000,
    )  # fmt: skip
    plain, rules = in_plain(copied), ("--keep-last", "9")
    assert collect(plain, "--dry-run") == {}
    put(copied.folder / "plain" / mark.key, seal(mark))
    assert [one["begun"] for one in run_here(plain, "prune", *rules, "--dry-run")[1]["steps"]] == [True]
    assert f"snapshots/{NAME}/{removed}" in collect(plain)
    assert not (copied.folder / "plain" / "snapshots" / NAME / removed).exists()

    for _ in planted_by_strangers(copied, mark.key, mark):
        assert collect(fleet) == {}
        code, document = run_here(fleet, "prune", *rules, "--yes")
        assert (code, document.get("done")) == (0, [])
        assert f"object {mark.key} " in document["snapshots"][0]["problem"]
        code, document = run_here(fleet, "delete", NAME, "--yes")
        assert (code, document.get("error")) == (3, refused)
        # A mark of pruned increments that is damaged hides nothing of the snapshot.
        said = "the last restorable snapshot" if kind == ONLY_FULL else f"object {mark.key} "
        assert said in document["message"]


def test_an_outcome_that_is_not_encrypted_does_not_end_a_running_create(copied: EncryptedChain) -> None:
    """Where nothing is encrypted, gc takes the create for failed, and removes what it has written."""
    fleet, nodes = copied.runs.fleet, tuple(node.id for node in copied.runs.fleet.nodes)
    running, store = new_operation("create", "other", 0, nodes), fleet.store.open()
    written = f"{base_prefix('other', nodes[0], running.operation)}/part-0.parquet"
    begin(store, running)
    store.create(written, b"rows")
    outcome = Outcome(
        operation=running.operation,
        kind="create",
        snapshot="other",
        increment=0,
        state="failed",
        reason="lock-lost",
        ended_at=running.began_at,
    )
    key = operation_key(running.operation, "outcome")
    plain = in_plain(copied)
    assert collect(plain, "--dry-run") == {}
    put(copied.folder / "plain" / key, seal(outcome))
    assert collect(plain) == {written: "failed"}

    with open_sessions(fleet, fleet.primaries) as sessions, lock_fleet(sessions, fleet.name, "ops@db7:1"):
        for _ in planted_by_strangers(copied, key, outcome):
            assert collect(fleet) == {}


@pytest.mark.parametrize("key", ["", "22" * 32])
def test_a_store_of_the_attackers_is_not_taken_for_ours(copied: EncryptedChain, key: str) -> None:
    """The whole store is replaced by one without encryption, or by one encrypted with another key."""
    shutil.rmtree(copied.store)
    theirs = with_key(copied, key) if key else without_key(copied.runs.fleet, copied.folder)
    assert run_here(theirs, "init")[0] == 0
    assert (copied.store / "keys").exists() == bool(key)
    for words in (["list"], ["create", "other"], ["init"]):
        code, document = run_here(copied.runs.fleet, *words)
        assert (code, document.get("error")) == (3, "store-key"), words
