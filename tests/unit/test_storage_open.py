from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.open import StoreUrlError, from_hashable, open_store, redact_url, to_hashable
from cutline.storage.s3 import S3Store
from cutline.storage.store import StoreUnreachableError

SECRET = "s3cr3t"
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), VALUES))
def test_options_survive_their_hashable_form(options: dict[str, Any]) -> None:
    hashable = to_hashable(options)
    assert from_hashable(hashable) == options
    assert hash(hashable) == hash(to_hashable(dict(reversed(options.items()))))
    assert from_hashable(pickle.loads(pickle.dumps(hashable))) == options


class Unopened(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system that asks for credentials when it is made, and does not get any."""

    def __init__(self, **options: Any) -> None:
        raise RuntimeError(f"refused: {options}")


def test_a_file_system_that_gets_no_credentials_is_unreachable() -> None:
    register_implementation("unopened", Unopened, clobber=True)
    with pytest.raises(StoreUnreachableError, match=r"opening it failed \(RuntimeError\)") as raised:
        open_store("unopened://bucket/folder", {"token": SECRET})
    assert SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("url", ["/var/backups", "file:///var/backups", "local:///var/backups", "/var/backups/"])
def test_a_folder_may_be_named_in_several_ways(url: str) -> None:
    store = open_store(url, {})
    assert isinstance(store, LocalStore)
    assert store.root == Path("/var/backups")
    assert store.url == "file:///var/backups"


def test_a_tilde_is_the_home_folder() -> None:
    store = open_store("~/backups", {})
    assert isinstance(store, LocalStore)
    assert store.root == Path.home() / "backups"


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3a://bucket", "s3://arn:aws:s3:x:1:accesspoint"])
def test_a_bucket_is_a_store(url: str) -> None:
    store = open_store(url, {"endpoint_url": "http://127.0.0.1:9"})
    assert isinstance(store, S3Store)
    assert store.root == url.partition("://")[2].rstrip("/")
    assert store.url == url.rstrip("/")


def test_the_same_arguments_give_the_same_store() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"max_pool_connections": 5}}
    assert open_store("s3://bucket/a", options) is open_store("s3://bucket/a", dict(options))
    assert open_store("s3://bucket/a", options) is not open_store("s3://bucket/b", options)
    assert open_store("s3://bucket/a", options) is not open_store("s3://bucket/a", options | {"anon": True})
    assert isinstance(open_store("memory://one", {}), InMemoryStore)
    assert open_store("memory://one", {}) is open_store("memory://one/", {})
    assert open_store("memory://one", {}) is not open_store("memory://two", {})


@pytest.mark.parametrize(
    "url",
    [
        "",
        "store",
        "./store",
        "../store",
        "file://",
        "file://store",
        "~no-such-user/store",
        "s3://",
        "s3:///folder",
        "s3://bucket//folder",
        "s3://bucket/../folder",
        "s3://bucket/a*",
        "s3://bucket?versionId=1",
        "s3://[bucket",
        "no-such-protocol://x",
    ],
)
def test_an_invalid_store_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(StoreUrlError) as raised:
        open_store(url, {})
    assert raised.value.exit_code == 2
    assert "[store_options]" in raised.value.hint


def test_an_unknown_option_is_refused_without_showing_its_value() -> None:
    with pytest.raises(StoreUrlError) as raised:
        open_store("github://folder", {"no_such_option": SECRET})
    assert SECRET not in text_of(raised.value)


@pytest.mark.parametrize("secret", [SECRET, "s3/cr3t", "s3?cr3t", "s3#cr3t", "s3@cr3t", "s3:cr3t"])
@pytest.mark.parametrize("url", ["s3://key:{}@bucket/folder", "no-such://key:{}@host/folder", "s3://key:{}@[x"])
def test_credentials_in_a_url_are_in_no_message(url: str, secret: str) -> None:
    with pytest.raises(StoreUrlError) as raised:
        open_store(url.format(secret), {})
    assert secret not in text_of(raised.value)
    assert "cr3t" not in text_of(raised.value)


@pytest.mark.parametrize(
    ("url", "shown_as"),
    [
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("s3://bucket/team@corp", "s3://bucket/team@corp"),
        ("sftp://user:secret@host:22/x", "sftp://host:22/x"),
        ("https://token@host/x?signature=secret", "https://host/x"),
        ("https://host/x#secret", "https://host/x"),
        ("simplecache::s3://key:secret@bucket/x", "simplecache::s3://bucket/x"),
        ("/var/backups/", "/var/backups"),
    ],
)
def test_a_redacted_url_still_says_which_store(url: str, shown_as: str) -> None:
    assert redact_url(url) == shown_as


def test_a_folder_is_opened_without_fsspec_and_s3fs() -> None:
    script = (
        "import sys; from cutline.storage.open import open_store; open_store('/x', {}).list('');"
        "print([name for name in ('fsspec', 's3fs', 'botocore', 'pyarrow') if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(root)}
    )
    assert done.stdout.strip() == "[]"


def text_of(error: StoreUrlError) -> str:
    return f"{error.message} {error.hint} {error.details}"
