"""Where encryption keys come from, and the key documents of a store."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from cutline.storage.encryption.encrypted_store import StoreKey
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.encryption.key_documents import (
    EncryptionKey,
    StoreKeyError,
    add_key,
    ensure_data_key,
    find_data_key,
    remove_key,
    stored_keys,
)
from cutline.storage.encryption.key_source import EncryptionKeyError, KeyCommandError, KeySource
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore

KEY = bytes(range(32))
HEX, BASE64 = KEY.hex(), "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
FIRST = "keys/0000000000000001.json"
# Nothing of it is a key: what the command prints besides one must not be shown.
PRINTED = "this-is-no-key-but-is-secret"


def key_file(path: Path, text: str, mode: int = 0o600) -> KeySource:
    path.write_text(text)
    path.chmod(mode)
    return KeySource(file=path)


def printing(text: str) -> KeySource:
    return KeySource(command=(sys.executable, "-c", f"print({text!r})"))


@pytest.fixture
def raw() -> ObjectStore:
    return InMemoryStore("memory://keys")


@pytest.mark.parametrize("text", [HEX, HEX.upper(), BASE64, f"\n {BASE64}\n"])
def test_a_key_is_read_from_a_file_a_variable_and_a_command(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_KEY", text)
    for source in (key_file(tmp_path / "key", text), KeySource(variable="FLEET_KEY"), printing(text)):
        assert source.read() == KEY


@pytest.mark.parametrize("text", ["", PRINTED, HEX[:-2], HEX + "00", BASE64[:-4], "ä" * 44])
def test_what_is_no_key_is_refused_without_being_shown(text: str, tmp_path: Path) -> None:
    for source in (key_file(tmp_path / "key", text), printing(text)):
        with pytest.raises(EncryptionKeyError, match="is not 32 bytes") as raised:
            source.read()
        assert not text or text not in f"{raised.value.message} {raised.value.hint} {raised.value.details}"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    source = key_file(tmp_path / "key", HEX, mode)
    with pytest.raises(EncryptionKeyError, match="open to other users"):
        source.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_a_file_of_root_may_have_a_group(tmp_path: Path) -> None:
    assert key_file(tmp_path / "key", HEX, 0o640).read() == KEY


def test_a_source_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEET_KEY", raising=False)
    for source, kind, match in (
        (KeySource(file=tmp_path / "none"), EncryptionKeyError, "can't be read: No such file"),
        (KeySource(variable="FLEET_KEY"), EncryptionKeyError, "FLEET_KEY is empty or not set"),
        (KeySource(command=("no-such-command",)), EncryptionKeyError, "can't be run: No such file"),
        (KeySource(command=(sys.executable, "-c", "exit('KMS says no')")), KeyCommandError, "code 1: KMS says no"),
    ):
        with pytest.raises(kind, match=match) as raised:
            source.read()
        assert raised.value.hint


def test_the_data_key_is_made_once_and_found_again(raw: ObjectStore) -> None:
    key = EncryptionKey(KEY, "shop")
    assert ensure_data_key(raw, key)
    body, data_key = raw.read(FIRST), find_data_key(raw, key).data_key
    assert not ensure_data_key(raw, key)
    assert (raw.list(""), raw.read(FIRST)) == ([FIRST], body)
    assert len(data_key) == 32
    assert [one for one in (KEY, data_key, data_key.hex().encode()) if one in body] == []


def test_another_key_or_another_fleet_does_not_open_the_store(raw: ObjectStore) -> None:
    ensure_data_key(raw, EncryptionKey(KEY, "shop"))
    for wrong in (EncryptionKey(bytes(32), "shop"), EncryptionKey(KEY, "other")):
        with pytest.raises(StoreKeyError, match="can't be opened with"):
            find_data_key(raw, wrong)
        with pytest.raises(StoreKeyError, match="can't be opened with"):
            ensure_data_key(raw, wrong)


def test_a_key_document_of_a_newer_format_is_named(raw: ObjectStore) -> None:
    raw.create(FIRST, b'{"schema": "cutline/key/2", "kdf": "novel"}')
    with pytest.raises(StoreKeyError) as refused:
        find_data_key(raw, EncryptionKey(KEY, "shop"))
    assert f"{FIRST} (a newer version of Cutline may have written it" in refused.value.message


def test_encryption_does_not_begin_in_a_store_that_is_in_use(raw: ObjectStore) -> None:
    raw.create("fleet.json", b"{}")
    with pytest.raises(StoreKeyError, match="is in use"):
        ensure_data_key(raw, EncryptionKey(KEY, "shop"))
    assert raw.list("") == ["fleet.json"]


def test_a_store_whose_key_documents_are_gone_is_not_taken_for_a_new_one(raw: ObjectStore) -> None:
    key = EncryptionKey(KEY, "shop")
    assert ensure_data_key(raw, key)
    raw.create("fleet.json", b"{}")
    raw.delete(FIRST)
    with pytest.raises(StoreKeyError, match="is in use"):
        ensure_data_key(raw, key)
    assert raw.list("") == ["fleet.json"]
    with pytest.raises(StoreKeyError, match="no key document"):
        find_data_key(raw, key)


def test_keys_rotate_and_the_data_key_stays(raw: ObjectStore) -> None:
    old, new = EncryptionKey(KEY, "shop"), EncryptionKey(bytes(range(1, 33)), "shop")
    ensure_data_key(raw, old)
    data_key = find_data_key(raw, old)
    added = add_key(raw, old, new)
    assert add_key(raw, old, new) == added
    assert len(raw.list("keys")) == 2
    with pytest.raises(StoreKeyError, match="is in use"):
        remove_key(raw, new, new.id)
    assert remove_key(raw, new, old.id) == [FIRST]
    assert find_data_key(raw, new) == data_key
    with pytest.raises(StoreKeyError, match=new.id):
        find_data_key(raw, old)
    with pytest.raises(StoreKeyError, match="has no encryption key"):
        remove_key(raw, new, old.id)


PLANTED = [b"", b"{", b"\xff", b"null", b"x" * 10_000, json.dumps({"schema": "cutline/key/1"}).encode()]


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_document_opens_nothing_and_blocks_nothing(raw: ObjectStore, planted: bytes) -> None:
    key = EncryptionKey(KEY, "shop")
    raw.create("keys/0000000000000000.json", planted)
    with pytest.raises(StoreKeyError, match="can't be opened with"):
        ensure_data_key(raw, key)
    raw.delete("keys/0000000000000000.json")
    ensure_data_key(raw, key)
    data_key = find_data_key(raw, key)
    raw.create("keys/0000000000000000.json", planted)
    assert find_data_key(raw, key) == data_key
    assert add_key(raw, key, EncryptionKey(bytes(32), "shop")).key == EncryptionKey(bytes(32), "shop").id


def test_a_document_that_is_given_the_name_of_another_key_opens_no_more(raw: ObjectStore) -> None:
    """Else removing the other key would remove this document too, and with it the last that opens."""
    old, new = EncryptionKey(KEY, "shop"), EncryptionKey(bytes(32), "shop")
    ensure_data_key(raw, old)
    add_key(raw, old, new)
    document = json.loads(raw.read("keys/0000000000000002.json"))
    raw.delete("keys/0000000000000002.json")
    raw.create("keys/0000000000000002.json", json.dumps(document | {"key": old.id}).encode())
    with pytest.raises(StoreKeyError, match="can't be opened with"):
        remove_key(raw, new, old.id)
    assert raw.list("keys") == [FIRST, "keys/0000000000000002.json"]


def test_a_document_of_an_attacker_with_the_name_of_our_key_is_passed_over(raw: ObjectStore) -> None:
    key = EncryptionKey(KEY, "shop")
    ensure_data_key(raw, key)
    data_key = find_data_key(raw, key).data_key
    stranger = EncryptionKey(bytes(32), "shop").wrap(StoreKey(b"a" * 32))
    raw.create("keys/0000000000000000.json", msgspec.json.encode(structs.replace(stranger, key=key.id)))
    assert find_data_key(raw, key).data_key == data_key
    planted, ours = [one.document for one in stored_keys(raw)]
    assert planted
    assert ours
    assert (planted.is_genuine(data_key), ours.is_genuine(data_key)) == (False, True)


@pytest.mark.parametrize(
    "change",
    [{"created_at": "1999-01-01T00:00:00.000Z"}, {"key": "0" * 16}, {"data_key": "AAAA"}, {"digests": "content"}],
)
def test_whoever_has_one_key_sees_what_was_changed_in_the_document_of_another(
    raw: ObjectStore, change: dict[str, str]
) -> None:
    key, escrow = EncryptionKey(KEY, "shop"), EncryptionKey(bytes(32), "shop")
    ensure_data_key(raw, key)
    document = add_key(raw, key, escrow)
    data_key = find_data_key(raw, key).data_key
    assert document.is_genuine(data_key)
    assert not structs.replace(document, **change).is_genuine(data_key)


def test_something_else_in_the_place_of_a_key_document_does_not_stop_another_key(tmp_path: Path) -> None:
    key, added = EncryptionKey(KEY, "shop"), EncryptionKey(bytes(32), "shop")
    raw = LocalStore(tmp_path)
    ensure_data_key(raw, key)
    (tmp_path / "keys" / "0000000000000002.json").mkdir()
    add_key(raw, key, added)
    assert find_data_key(raw, added) == find_data_key(raw, key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user's")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    source = key_file(tmp_path / "key", HEX)
    os.chown(tmp_path / "key", 65534, 65534)
    with pytest.raises(EncryptionKeyError, match="belongs to another user"):
        source.read()


def test_a_key_that_a_failing_command_prints_as_an_error_is_not_shown() -> None:
    program = f"import sys; sys.stderr.write('+ cat {HEX} {BASE64}'); exit(1)"
    with pytest.raises(KeyCommandError) as raised:
        KeySource(command=(sys.executable, "-c", program)).read()
    assert [text for text in (HEX, BASE64.rstrip("=")) if text in raised.value.message] == []


def test_the_key_is_read_when_the_store_is_used_and_only_once(tmp_path: Path) -> None:
    raw, log = InMemoryStore("memory://once"), tmp_path / "log"
    command = (sys.executable, "-c", f"open({str(log)!r}, 'a').write('x'); print({HEX!r})")
    encryption = FleetEncryption(KeySource(command=command), "shop")
    ensure_data_key(raw, encryption.read_key())
    log.write_text("")
    store = encryption.over(raw)
    store.exists("a")
    assert log.read_text() == ""
    store.create("a", b"1")
    assert store.read("a") == b"1"
    assert log.read_text() == "x"
