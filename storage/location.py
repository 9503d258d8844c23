"""Where a store is: its URL and the options that reach it, as fleet.toml names them and as tasks are sent them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.open import open_store
from storage.store import ObjectStore, redact_url


@dataclass(frozen=True, slots=True, repr=False)
class StoreLocation:
    """A store's URL and its options, which may hold secrets.

    It can be pickled, which an open store can't. Printed, it is the URL without credentials.
    """

    url: str
    options: Mapping[str, object] = field(default_factory=dict)

    def open(self) -> ObjectStore:
        """Open the store; contact nothing. The same location gives the same store in one process.

        Raises StoreUrlError.
        """
        return open_store(self.url, self.options)

    def __str__(self) -> str:
        return redact_url(self.url)

    def __repr__(self) -> str:
        return f"StoreLocation({redact_url(self.url)!r})"
