"""A document is read within bounds: its size, its texts, its depth; and each of its keys stands once."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
import zstandard
from msgspec import structs

from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.commit import DatabaseFacts, FullSnapshot
from cutline.snapshots.records.documents import (
    COMPRESSED_FROM,
    DOCUMENT_BYTES_MAX,
    TEXT_MAX,
    ZSTD_MAGIC,
    ManifestError,
    TextTooLongError,
    parse_document,
    seal,
    unseal,
)
from cutline.snapshots.records.proven_chains import commit_key, read_commit
from cutline.storage.local import LocalStore
from tests.mutations.sealing import seal_text
from tests.unit.made_commits import commit, memory

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
    return seal(commit(0)).decode().rpartition(',"digest"')[0] + "}"


def test_a_document_sealed_by_somebody_else_is_read(tmp_path: Path) -> None:
    assert read_commit(store_with(tmp_path, seal_text(unsealed())), "daily", 0).snapshot == "daily"


def test_a_document_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    store = store_with(tmp_path, b"{")
    with (tmp_path / KEY).open("r+b") as file:
        # A sparse file: it takes no room here, but its reader would need all of it.
        file.truncate(DOCUMENT_BYTES_MAX * 4)
    assert "too large to be a document" in refusal(store)


@pytest.mark.parametrize("place", ['"comment":""', '"bytes":20', '"a":"0/0"'])
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, place: str) -> None:
    text = unsealed()
    assert place in text
    assert "occurs twice" in refusal(store_with(tmp_path, seal_text(text.replace(place, f"{place}, {place}", 1))))


def test_a_text_longer_than_any_argument_is_refused(tmp_path: Path) -> None:
    text = unsealed().replace('"comment":""', f'"comment":"{"x" * (TEXT_MAX + 1)}"')
    assert "comment is longer" in refusal(store_with(tmp_path, seal_text(text)))


def test_a_hundred_thousand_lists_within_each_other_are_refused(tmp_path: Path) -> None:
    text = unsealed().replace('"comment":""', f'"comment":{"[" * 100_000}{"]" * 100_000}')
    refusal(store_with(tmp_path, seal_text(text)))


def commit_of(comment: str) -> bytes:
    return seal(structs.replace(commit(0), comment=comment))


def test_a_large_document_is_compressed(tmp_path: Path) -> None:
    comment = "comment " * 8_000
    assert commit_of(comment).startswith(b"{")
    larger = structs.replace(commit(0), left_out=(LeftOut("a", LeftOutKind.SUBSCRIPTION, comment, "why"),) * 5)
    body = seal(larger)
    assert body.startswith(ZSTD_MAGIC)
    assert len(body) < COMPRESSED_FROM // 100
    content, _ = unseal(KEY, body)
    assert parse_document(KEY, content, FullSnapshot) == larger
    flipped = [body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :] for place in range(4, len(body), 7)]
    for changed in (body[:-1], ZSTD_MAGIC, ZSTD_MAGIC + b"{}", *flipped):
        # zstd ignores some bits of its own.
        found, refused = content, None
        try:
            found, _ = unseal(KEY, changed)
        except ManifestError as error:
            refused = error
        assert found == content
        if refused:
            assert refused.message.startswith(f"object {KEY} is damaged: ")
            assert refused.hint.startswith("put it back from a copy")


def test_a_document_that_unpacks_to_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with zstandard.ZstdCompressor().stream_writer(compressed := io.BytesIO(), closefd=False) as writer:
        for _ in range(1 << 10):
            writer.write(bytes(1 << 20))
    body = compressed.getvalue()
    assert "larger than 256 MiB" in refusal(store_with(tmp_path, body))
    # Records of operations are smaller, and many are read at once.
    with pytest.raises(ManifestError, match="larger than 64 MiB"):
        unseal("operations/op-1/intent.json", body)


@pytest.mark.parametrize("ends", ["", '"', "\\", 'a"b', '"' * 100_000, "\\" * 70_000, "é"])
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_the_longest_text_is_read_and_a_longer_one_is_not(ends: str, more: int) -> None:
    """Quotes and backslashes are escaped in JSON, where quotes also end texts."""
    text = ends[: TEXT_MAX + more] + "x" * (TEXT_MAX + more - len(ends))
    for whole in (text, text[::-1]):
        assert len(whole) == TEXT_MAX + more
        if more <= 0:
            content, _ = unseal(KEY, commit_of(whole))
            assert parse_document(KEY, content, FullSnapshot).comment == whole
            continue
        with pytest.raises(TextTooLongError, match="comment is longer"):
            commit_of(whole)
        by_hand = seal_text(unsealed().replace('"comment":""', f'"comment":{msgspec.json.encode(whole).decode()}'))
        content, _ = unseal(KEY, by_hand)
        with pytest.raises(ManifestError, match="comment is longer"):
            parse_document(KEY, content, FullSnapshot)


def test_a_commit_that_would_not_be_read_is_not_stored() -> None:
    store = memory()
    with pytest.raises(TextTooLongError, match=f"search_path is longer than {TEXT_MAX}") as refused:
        put_commit(store, structs.replace(commit(0), databases={"a": long_search_path(TEXT_MAX + 1)}))
    assert refused.value.exit_code == 3
    assert refused.value.message.startswith("nothing was committed")
    assert "snapshot daily" in refused.value.message
    assert store.inventory("") == []
    put_commit(store, structs.replace(commit(0), databases={"a": long_search_path(TEXT_MAX)}))
    read_commit(store, "daily", 0)


def long_search_path(length: int) -> DatabaseFacts:
    return DatabaseFacts(1, session_settings={"search_path": "x" * length})
