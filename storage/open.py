"""Open a store by its URL, and redact URLs for messages.

Every process opens a store, so this module is cheap to import: fsspec and s3fs are imported only for URLs that need
them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore, StoreUnreachableError, check_key

STORES_KEPT_MAX = 64
GCS_PROTOCOLS = ("gs", "gcs")
# The class that gcsfs registers asks over gRPC for the bucket's type before it reads or writes. If nothing answers, as
# with an emulator, it keeps asking for a minute before every request.
GCS_FILE_SYSTEM = "gcsfs.core.GCSFileSystem"
GCS_CONNECT_SECONDS_MAX = 5
GCS_ANSWER_SECONDS_MAX = 30
HashableOptions: TypeAlias = tuple[Any, ...]


class StoreUrlError(UsageError):
    """The URL or the options of a store are invalid."""

    def __init__(self, *, url: str, problem: str) -> None:
        super().__init__(
            f"store {url}: {problem}",
            hint="set store to s3://bucket/folder or to a folder, and check [store_options] in fleet.toml",
            details={"store": url},
        )


def redact_url(url: str) -> str:
    """Return `url` without user, password, query and fragment, which may be secret.

    `url` may be any text, because messages name refused URLs, too. When in doubt, the path is dropped: a password may
    contain the very characters that normally end it.
    """
    protocol, separator, rest = url.partition("://")
    authority = rest.partition("/")[0]
    if "@" in authority or ":" in authority:
        rest = rest.rpartition("@")[2]
    return f"{protocol}{separator}{re.split('[?#]', rest)[0]}".rstrip("/")


def open_store(url: str, options: Mapping[str, object], *, is_made: bool = False) -> ObjectStore:
    """Return the store at `url`: a folder (a path or `file://`), `memory://name`, or any URL that fsspec supports.

    A folder's path must be absolute, because fleet.toml must name the same store from every working directory and on
    executors. `options` are passed to fsspec unchanged. `is_made`: the store has answered before
    (ObjectStore.expect_answers). Nothing is created, and nothing is contacted except some file systems' sources of
    credentials. Within one process, calls with equal arguments share one store. Raises StoreUrlError, and
    StoreUnreachableError if there are no credentials.
    """
    # A forked process must not share its parent's connections, hence the process id.
    store = _open_once(url, to_hashable(options), os.getpid())
    if is_made:
        store.expect_answers()
    return store


@lru_cache(maxsize=STORES_KEPT_MAX)
def _open_once(url: str, options: HashableOptions, process_id: int) -> ObjectStore:  # noqa: ARG001  # part of the key
    protocol, separator, rest = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return _open_folder(url, rest if separator else url)
    if protocol == "memory":
        return _open_memory(rest.strip("/"))
    try:
        return _open_fsspec(url, protocol, from_hashable(options))
    except ImportError as error:
        raise StoreUrlError(url=redact_url(url), problem=str(error)) from error
    except (TypeError, ValueError, KeyError) as error:
        # A TypeError names the option but may also quote its value, so it must not appear in a traceback.
        problem = f"fsspec refused the URL or the options ({type(error).__name__})"
        raise StoreUrlError(url=redact_url(url), problem=problem) from None
    except SnapshotError:
        raise
    except Exception as error:  # noqa: BLE001  # raised again, without its text
        # Some file systems look up their credentials as soon as they are opened.
        raise StoreUnreachableError(url=redact_url(url), reason=f"opening it failed ({type(error).__name__})") from None


def _open_folder(url: str, folder: str) -> LocalStore:
    try:
        path = Path(folder).expanduser()
    except RuntimeError as error:
        raise StoreUrlError(url=url, problem="its ~ names a user without a home folder") from error
    if not path.is_absolute():
        raise StoreUrlError(url=url, problem="not the absolute path of a folder")
    return LocalStore(path)


@cache
def _open_memory(name: str) -> InMemoryStore:
    return InMemoryStore(f"memory://{name}")


def _open_fsspec(url: str, protocol: str, options: dict[str, object]) -> ObjectStore:
    if protocol in ("s3", "s3a"):
        from cutline.storage.s3 import S3Store
        from cutline.storage.s3_client import s3_client

        root = _s3_root(url)
        return S3Store(redact_url(url), root, s3_client(options, redact_url(url)))
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    from cutline.storage.fsspec_store import FsspecStore

    if protocol in GCS_PROTOCOLS:
        options = _prepare_gcs(protocol, options)
    filesystem, path = url_to_fs(url, **options, use_listings_cache=False, skip_instance_cache=True)
    return FsspecStore(redact_url(url), str(path).rstrip("/"), filesystem)


def _prepare_gcs(protocol: str, options: dict[str, object]) -> dict[str, object]:
    """Register the file system that Cutline uses for Google Cloud Storage as `protocol`; return its options."""
    from aiohttp import ClientTimeout
    from fsspec import register_implementation  # type: ignore[import-untyped]

    register_implementation(protocol, GCS_FILE_SYSTEM, clobber=True, errtxt="pip install gcsfs")
    # gcsfs logs the server's answer to each failed request, in addition to raising it.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # By default gcsfs waits for an answer forever. `sock_read` limits the time between two pieces of an answer.
    waits = ClientTimeout(total=None, sock_connect=GCS_CONNECT_SECONDS_MAX, sock_read=GCS_ANSWER_SECONDS_MAX)
    return {"requests_timeout": waits, **options}


def _s3_root(url: str) -> str:
    """Return bucket and folder; refuse credentials in the URL, which s3fs would mistake for the bucket."""
    root = url.partition("://")[2].rstrip("/")
    bucket = root.partition("/")[0]
    if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
        raise StoreUrlError(url=redact_url(url), problem="credentials belong in [store_options], not in the URL")
    try:
        return check_key(root)
    except ValueError:
        problem = "not a bucket and a folder"
        # The error quotes the whole URL.
        raise StoreUrlError(url=redact_url(url), problem=problem) from None


def to_hashable(options: Mapping[str, object]) -> HashableOptions:
    """Return `options` in a hashable form; `from_hashable` is the inverse."""

    def hash_form(value: object) -> object:
        if isinstance(value, Mapping):
            return ("mapping", tuple(sorted((name, hash_form(inner)) for name, inner in value.items())))
        if isinstance(value, (list, tuple)):
            return ("list", tuple(hash_form(inner) for inner in value))
        return ("value", value)

    return tuple(sorted((name, hash_form(value)) for name, value in options.items()))


def from_hashable(options: HashableOptions) -> dict[str, object]:
    """Undo `to_hashable`; tuples come back as lists."""

    def plain_form(value: Any) -> object:
        kind, inner = value
        if kind == "mapping":
            return {name: plain_form(item) for name, item in inner}
        if kind == "list":
            return [plain_form(item) for item in inner]
        return inner

    return {name: plain_form(value) for name, value in options}
