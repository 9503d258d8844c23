"""The contract of every ObjectStore. A store's own test inherits ObjectStoreContract and provides `store`."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest

from cutline.storage.digest import PIECE_BYTES
from cutline.storage.probe import probe_store
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from tests.stores.planting import plant

THREADS = 16
MEBIBYTE = 2**20
CLOCKS_DIFFER = timedelta(minutes=2)
BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    ".hidden",
    "a/.hidden",
    "a?b",
    "a*",
    "a\\b",
    "a\nb",
    "a%2e",
]


class ObjectStoreContract:
    """Subclasses define the fixture `store`, which is empty for each test."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        raise NotImplementedError

    def test_a_store_that_has_answered_another_process_is_the_same(self, store: ObjectStore) -> None:
        store.create("a/first", b"1")
        store.expect_answers()
        store.create("a/second", b"2")
        assert [store.read(key) for key in store.list("a")] == [b"1", b"2"]

    @pytest.mark.parametrize("body", [b"", b"x", bytes(range(256)) * 4096])
    def test_a_created_object_is_read_back(self, store: ObjectStore, body: bytes) -> None:
        store.create("a/b/object", body)
        assert store.read("a/b/object") == body
        assert store.size("a/b/object") == len(body)
        assert store.exists("a/b/object")

    def test_creating_a_taken_key_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        store.create("a/object", b"first")
        for body in (b"second", b"first", b"", b"x" * MEBIBYTE):
            with pytest.raises(ObjectExistsError, match="a/object"):
                store.create("a/object", body)
        assert store.read("a/object") == b"first"
        assert store.list("") == ["a/object"]

    def test_an_empty_object_takes_its_key_too(self, store: ObjectStore) -> None:
        store.create("empty", b"")
        with pytest.raises(ObjectExistsError):
            store.create("empty", b"body")

    def test_of_many_creators_exactly_one_wins(self, store: ObjectStore) -> None:
        for size in (20, 300_000):
            bodies = [(b"creator %4d " % number) * (size // 13) for number in range(THREADS)]
            barrier = Barrier(THREADS)

            def create(body: bytes, key: str = f"race/{size}", barrier: Barrier = barrier) -> bool:
                barrier.wait()
                try:
                    store.create(key, body)
                except ObjectExistsError:
                    return False
                return True

            with ThreadPoolExecutor(THREADS) as threads:
                won = list(threads.map(create, bodies))
            assert won.count(True) == 1
            assert store.read(f"race/{size}") == bodies[won.index(True)]

    def test_many_threads_create_and_read_different_objects(self, store: ObjectStore) -> None:
        def create_and_read(number: int) -> bytes:
            store.create(f"many/{number:02}/object", b"%d" % number)
            return store.read(f"many/{number:02}/object")

        with ThreadPoolExecutor(THREADS) as threads:
            assert list(threads.map(create_and_read, range(40))) == [b"%d" % number for number in range(40)]
        assert store.list_children("many") == [f"{number:02}" for number in range(40)]

    def test_a_missing_object_is_missing_in_every_way(self, store: ObjectStore) -> None:
        store.create("folder/object", b"x")
        for key in ("nothing", "folder", "folder/obj", "folder/nothing", "no/such/folder"):
            assert not store.exists(key)
            for ask in (store.read, store.size, lambda key: store.read_range(key, 0, 1)):
                with pytest.raises(ObjectMissingError, match=key):
                    ask(key)

    def test_a_range_ends_where_the_object_does(self, store: ObjectStore) -> None:
        store.create("object", b"0123456789")
        assert store.read_range("object", 0, 4) == b"0123"
        assert store.read_range("object", 6, 4) == b"6789"
        assert store.read_range("object", 8, 100) == b"89"
        assert store.read_range("object", 10, 1) == b""
        assert store.read_range("object", 99, 1) == b""
        for start, length in ((-1, 2), (0, 0), (3, -1)):
            with pytest.raises(ValueError, match="range"):
                store.read_range("object", start, length)

    def test_a_listing_is_sorted_and_complete_and_ends_at_the_folder(self, store: ObjectStore) -> None:
        keys = [
            "snapshots/b/x",
            "snapshots/a/2/deep/er",
            "snapshots/a/1",
            "snapshots/ab/1",
            "snapshots2/a",
            "top",
        ]
        for key in keys:
            store.create(key, b"x")
        assert store.list("") == sorted(keys)
        assert store.list("snapshots") == store.list("snapshots/") == sorted(k for k in keys if "s/" in k)
        assert store.list("snapshots/a") == ["snapshots/a/1", "snapshots/a/2/deep/er"]
        assert store.list("top") == []
        assert store.list("nothing/here") == []

    def test_children_are_one_level_of_names(self, store: ObjectStore) -> None:
        for key in ("snapshots/b/x", "snapshots/b/y/z", "snapshots/a/1", "snapshots/file", "other/x"):
            store.create(key, b"x")
        assert store.list_children("snapshots") == ["a", "b", "file"]
        assert store.list_children("snapshots/") == ["a", "b", "file"]
        assert store.list_children("") == ["other", "snapshots"]
        assert store.list_children("snapshots/file") == []
        assert store.list_children("nothing") == []

    def test_listings_are_never_stale(self, store: ObjectStore) -> None:
        assert store.list("a") == store.list_children("a") == []
        assert not store.exists("a/1")
        for number in (1, 2, 3):
            store.create(f"a/{number}", b"x" * number)
            assert store.exists(f"a/{number}")
            assert store.list("a") == [f"a/{n}" for n in range(1, number + 1)]
            assert store.list_children("a") == [f"{n}" for n in range(1, number + 1)]
        store.delete("a/2")
        assert store.list("a") == ["a/1", "a/3"]
        assert store.list_children("a") == ["1", "3"]
        assert not store.exists("a/2")

    def test_deleting_is_final_and_may_be_repeated(self, store: ObjectStore) -> None:
        store.create("a/b/c", b"x")
        store.create("a/kept", b"x")
        for _ in range(2):
            store.delete("a/b/c")
        store.delete("never/was")
        assert store.list("") == ["a/kept"]
        assert store.list_children("a") == ["kept"]
        store.create("a/b/c", b"again")
        assert store.read("a/b/c") == b"again"

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_an_invalid_key_is_refused(self, store: ObjectStore, key: str) -> None:
        for ask in (store.read, store.size, store.exists, store.delete, lambda key: store.create(key, b"x")):
            with pytest.raises(ValueError, match="not a valid object key"):
                ask(key)
        assert store.list("") == []

    def test_keys_may_hold_spaces_and_letters_of_any_script(self, store: ObjectStore) -> None:
        keys = ["a/part-0001=x+y@z.parquet", "a/été", "a/with space"]
        for key in keys:
            store.create(key, key.encode())
        assert store.list("a") == sorted(keys)
        assert [store.read(key) for key in keys] == [key.encode() for key in keys]

    def test_the_store_passes_the_probe_which_leaves_nothing(self, store: ObjectStore) -> None:
        probe_store(store)
        assert store.list("") == []

    def test_an_inventory_has_the_sizes_and_times_of_the_listed_objects(self, store: ObjectStore) -> None:
        before = datetime.now(UTC) - CLOCKS_DIFFER
        for key, size in (("a/1", 0), ("a/b/2", 5), ("c", 7)):
            store.create(key, b"x" * size)
        assert [(one.key, one.size) for one in store.inventory("")] == [("a/1", 0), ("a/b/2", 5), ("c", 7)]
        assert [one.key for one in store.inventory("a")] == store.list("a")
        assert all(before < one.created_at < datetime.now(UTC) + CLOCKS_DIFFER for one in store.inventory(""))
        assert store.inventory("nothing") == []

    def test_an_inventory_begins_after_a_key_whether_there_is_one_or_not(self, store: ObjectStore) -> None:
        for key in ("a/1.json", "a/1.2.json", "a/2.json", "a/3/4", "b"):
            store.create(key, b"")
        for after, listed in (
            ("a/0", ["a/1.2.json", "a/1.json", "a/2.json", "a/3/4"]),
            ("a/1/", ["a/2.json", "a/3/4"]),
            ("a/2.json", ["a/3/4"]),
            ("a/4", []),
        ):
            assert [one.key for one in store.inventory("a", after)] == listed

    @pytest.mark.parametrize("size", [0, 3, PIECE_BYTES, PIECE_BYTES + 1])
    def test_a_digest_is_the_sha256_of_the_bytes(self, store: ObjectStore, size: int) -> None:
        body = (bytes(range(256)) * (size // 256 + 1))[:size]
        store.create("object", body)
        assert store.digest("object") == hashlib.sha256(body).hexdigest()
        with pytest.raises(ObjectMissingError):
            store.digest("nothing")

    def test_a_completed_create_leaves_nothing_unfinished(self, store: ObjectStore) -> None:
        store.create("object", b"x")
        with pytest.raises(ObjectExistsError):
            store.create("object", b"y")
        assert store.unfinished() == []

    @pytest.mark.parametrize("name", ["a%b", "a*b", "a#b", ".hidden", "a\\b"])
    def test_objects_of_other_names_are_not_listed(self, store: ObjectStore, name: str) -> None:
        store.create("a/object", b"x")
        for foreign in (f"{name}1", f"a/{name}1", f"{name}/object", f"a/{name}/object"):
            plant(store, foreign)
        assert store.list("") == [one.key for one in store.inventory("")] == ["a/object"]
        assert store.list("a") == ["a/object"]
        assert store.list_children("") == ["a"]
        assert store.list_children("a") == ["object"]
        store.delete("a/object")
        assert store.list("") == []
