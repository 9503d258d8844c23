"""The location of a store: its URL, options and encryption, as in fleet.toml and as sent to tasks."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from cutline.storage.open import STORES_KEPT_MAX, HashableOptions, from_hashable, open_store, redact_url, to_hashable
from cutline.storage.rate import PacedStore, RateLimit
from cutline.storage.store import ObjectStore


class StoreEncryption(Hashable, Protocol):
    """How a store is encrypted: a hashable value without open files or connections."""

    def over(self, raw: ObjectStore) -> ObjectStore:
        """Return a store that encrypts objects and stores them in `raw`. Nothing is read yet."""
        ...

    def for_tasks(self, opened: Any) -> StoreEncryption:
        """Return the encryption to send to tasks in other processes; `opened` is a store that `over` returned."""
        ...


S3_PROTOCOLS = ("s3", "s3a")
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
AWS_DOMAINS = ("amazonaws.com", "amazonaws.com.cn", "api.aws")
AUTHORITY_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, slots=True, repr=False)
class StoreLocation:
    """A store's URL, its options, which may contain secrets, and its encryption.

    A location can be pickled; an open store can't. The pickle contains the data key, but not the operator's key. str()
    and repr() show only the URL without credentials.
    """

    url: str
    options: Mapping[str, object] = field(default_factory=dict)
    encryption: StoreEncryption | None = None
    # True in tasks: the driver has already reached the store (ObjectStore.expect_answers).
    is_made: bool = field(default=False, compare=False)
    # How fast this process may store objects; None: no limit. Up to `tasks_max` tasks in other processes share the rate
    # while this process waits for them.
    bytes_per_second: float | None = None
    tasks_max: int = 1

    def open(self) -> ObjectStore:
        """Open the store without contacting it. Within one process, equal locations share one store.

        Raises StoreUrlError.
        """
        raw = self.open_raw()
        if self.encryption is None and self.bytes_per_second is None:
            return raw
        return _open_once(self.url, to_hashable(self.options), self.encryption, self.bytes_per_second, os.getpid())

    def open_raw(self) -> ObjectStore:
        """Open the underlying store, without decryption and without a limit on its rate; see `open`."""
        return open_store(self.url, self.options, is_made=self.is_made)

    @property
    def endpoint(self) -> str:
        """The service that the store is reached through; "" if the URL alone determines it.

        For S3 this is the client's own endpoint, because a configuration file may name it. All endpoints of AWS in one
        partition show the same buckets, so they count as one.
        """
        named = str(self.options.get("endpoint_url") or _client_options(self.options).get("endpoint_url") or "")
        if self.url.partition("://")[0] not in S3_PROTOCOLS:
            return named
        from cutline.storage.s3 import S3Store  # s3fs is imported only for stores that need it

        raw = self.open_raw()
        return _service_of(raw.client.endpoint_url) if isinstance(raw, S3Store) else named

    @property
    def warnings(self) -> list[str]:
        """Warnings about an insecure connection to the store; usually none."""
        return warnings_of(self.url, self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the location for tasks, with `is_made`; raise any error from reading the key."""
        encryption = self.encryption and self.encryption.for_tasks(self.open())
        share = None if self.bytes_per_second is None else self.bytes_per_second / self.tasks_max
        return StoreLocation, (self.url, self.options, encryption, True, share)

    def __str__(self) -> str:
        return redact_url(self.url)

    def __repr__(self) -> str:
        return f"StoreLocation({redact_url(self.url)!r})"


@lru_cache(maxsize=STORES_KEPT_MAX)
def _open_once(
    url: str,
    options: HashableOptions,
    encryption: StoreEncryption | None,
    bytes_per_second: float | None,
    process_id: int,  # noqa: ARG001  # part of the key
) -> ObjectStore:
    raw = open_store(url, from_hashable(options))
    if bytes_per_second is not None:
        raw = PacedStore(raw, RateLimit(bytes_per_second))
    return raw if encryption is None else encryption.over(raw)


def with_environment(url: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return `options` with the endpoint and the certificate authorities that this process's environment names.

    Executors on other machines don't have this environment: they would use a different endpoint or different
    authorities.
    """
    completed = dict(options)
    if url.partition("://")[0] not in S3_PROTOCOLS:
        return completed
    client = _client_options(options)
    if not completed.get("endpoint_url") and not client.get("endpoint_url"):
        ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
        named = [os.environ[name] for name in ENDPOINT_VARIABLES if os.environ.get(name)]
        if named and not ignored:
            completed["endpoint_url"] = named[0]
    trusted = [os.environ[name] for name in AUTHORITY_VARIABLES if os.environ.get(name)]
    if not completed.get("ca_file") and "verify" not in client and trusted:
        completed["ca_file"] = trusted[0]
    return completed


def warnings_of(url: str, options: Mapping[str, object]) -> list[str]:
    """Return a sentence for each way in which the connection to such a store is insecure; none if it is not S3."""
    if url.partition("://")[0] not in S3_PROTOCOLS:
        return []
    client = _client_options(options)
    endpoint = str(options.get("endpoint_url") or client.get("endpoint_url") or "")
    try:
        urlsplit(endpoint)
    except ValueError:  # opening the store reports this error
        return []
    if _is_plain(endpoint, options, client):
        how = _origin(endpoint) or "use_ssl is false"
        return [
            f"the store is accessed without TLS ({how}): anyone on the network can read and change it;"
            " use an https:// endpoint"
        ]
    if client.get("verify") is False:
        return ["the store's certificate is not verified: anyone on the network can impersonate the store; set ca_file"]
    return []


def _is_plain(endpoint: str, options: Mapping[str, object], client: Mapping[str, object]) -> bool:
    if not endpoint:
        return options.get("use_ssl") is False or client.get("use_ssl") is False
    return urlsplit(endpoint).scheme.lower() == "http" and not _is_loopback(urlsplit(endpoint).hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _service_of(endpoint: str) -> str:
    """Return the endpoint, or a name of the AWS partition whose buckets it shows."""
    host = urlsplit(endpoint).hostname or ""
    for domain in AWS_DOMAINS:
        if host.endswith(f".{domain}"):
            return f"{domain}/us-gov" if "us-gov-" in host else domain
    return endpoint


def _origin(endpoint: str) -> str:
    """Return the endpoint's scheme, host and port, without any password."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if endpoint else ""


def _client_options(options: Mapping[str, object]) -> dict[str, object]:
    given = options.get("client_kwargs")
    return dict(given) if isinstance(given, Mapping) else {}
