"""A document is read within bounds: its size, its texts, its depth; and each of its keys stands once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.snapshots.records.documents import DOCUMENT_BYTES_MAX, TEXT_MAX, ManifestError, seal
from cutline.snapshots.records.proven_chains import commit_key, read_commit
from cutline.storage.local import LocalStore
from tests.mutations.sealing import seal_text
from tests.unit.made_commits import commit

KEY = commit_key("daily", 0)


def store_with(folder: Path, body: bytes) -> LocalStore:
    store = LocalStore(folder)
    store.create(KEY, body)
    return store


def refusal(store: LocalStore) -> str:
    with pytest.raises(ManifestError) as refused:
        read_commit(store, "daily", 0)
    assert refused.value.exit_code == 3
    assert KEY in refused.value.message
    assert len(refused.value.message) < 1000
    return refused.value.message


def unsealed() -> str:
    return seal(commit(0)).decode().rpartition(',\n "digest"')[0] + "\n}"


def test_a_document_sealed_by_somebody_else_is_read(tmp_path: Path) -> None:
    assert read_commit(store_with(tmp_path, seal_text(unsealed())), "daily", 0).snapshot == "daily"


def test_a_document_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, b"{")
    with (tmp_path / KEY).open("r+b") as file:
        # A sparse file: it takes no room here, but its reader would need all of it.
        file.truncate(DOCUMENT_BYTES_MAX * 4)
    assert "too large to be a document" in refusal(store)


@pytest.mark.parametrize("place", ['"comment": ""', '"bytes": 20', '"a": "0/0"'])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, place: str) -> None:
    text = unsealed()
    assert place in text
    assert "occurs twice" in refusal(store_with(tmp_path, seal_text(text.replace(place, f"{place}, {place}", 1))))


def test_a_text_longer_than_any_argument_is_refused(tmp_path: Path) -> None:
    text = unsealed().replace('"comment": ""', f'"comment": "{"x" * (TEXT_MAX + 1)}"')
    assert "comment is longer" in refusal(store_with(tmp_path, seal_text(text)))


def test_a_hundred_thousand_lists_within_each_other_are_refused(tmp_path: Path) -> None:
    text = unsealed().replace('"comment": ""', f'"comment": {"[" * 100_000}{"]" * 100_000}')
    refusal(store_with(tmp_path, seal_text(text)))
