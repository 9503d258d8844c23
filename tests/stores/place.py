"""A running object server that fsspec can reach."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.storage.fsspec_store import FsspecStore
from cutline.storage.open import open_store


@dataclass(frozen=True, slots=True)
class StorePlace:
    """`options` are the store_options that reach the server at `endpoint_url`."""

    protocol: str
    endpoint_url: str
    options: dict[str, object]

    def bucket(self, name: str) -> str:
        """Create a bucket, or container, and return its URL for open_store."""
        url = f"{self.protocol}://{name}"
        store = open_store(url, self.options)
        assert isinstance(store, FsspecStore)
        store.filesystem.mkdir(name)
        return url

    def through(self, endpoint_url: str) -> dict[str, object]:
        """Return the options that reach the server through a proxy."""
        return {name: str(value).replace(self.endpoint_url, endpoint_url) for name, value in self.options.items()}
