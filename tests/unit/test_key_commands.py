"""`snapshot key`: what a second operator, a full disk or a mistyped option can do to a store's keys."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

import cutline.cli.main
from cutline.storage.encryption.key_documents import (
    EncryptionKey,
    add_key,
    ensure_data_key,
    find_data_key,
    remove_key,
    stored_keys,
)
from cutline.storage.memory import InMemoryStore

OURS, THEIRS = (EncryptionKey(bytes([number]) * 32, "shop") for number in (1, 2))


def test_two_who_remove_each_others_key_at_once_leave_one_that_opens_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = InMemoryStore("memory://keys")
    ensure_data_key(raw, OURS)
    data_key = find_data_key(raw, OURS)
    add_key(raw, OURS, THEIRS)
    delete = InMemoryStore.delete

    def delete_after_theirs(store: InMemoryStore, key: str) -> None:
        monkeypatch.setattr(InMemoryStore, "delete", delete)
        remove_key(store, THEIRS, OURS.id)
        delete(store, key)

    monkeypatch.setattr(InMemoryStore, "delete", delete_after_theirs)
    remove_key(raw, OURS, THEIRS.id)
    assert find_data_key(raw, OURS) == data_key


def test_a_planted_document_of_nested_lists_is_named_and_ends_no_command() -> None:
    raw = InMemoryStore("memory://keys")
    ensure_data_key(raw, OURS)
    raw.create("keys/0000000000000002.json", b'{"schema":' + b"[" * 4000)
    assert [one.document is None for one in stored_keys(raw)] == [False, True]
    assert find_data_key(raw, OURS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key-command", "cat 'a"], "--key-command is not a valid command line: No closing quotation"),
        (["--key-command", " "], "name the new key with exactly one of"),
        (["--key-variable", ""], "name the new key with exactly one of"),
    ],
)
def test_a_source_that_names_nothing_is_a_mistake_in_the_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cutline.cli.main.run(["key", "add", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_key_that_can_not_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        assert cutline.cli.main.run(["key", "new", str(tmp_path / "key")]) == 2
    assert list(tmp_path.iterdir()) == []
    assert cutline.cli.main.run(["key", "new", str(tmp_path / "key")]) == 0


def test_the_command_for_a_new_key_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "the shop's key"
    assert cutline.cli.main.run(["key", "new", str(file)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "key add" in line)
    assert shlex.split(line.partition("store that already has a key: ")[2])[-2:] == ["--key-file", str(file)]
