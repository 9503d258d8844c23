"""How much work a command's jobs have, and whether the command runs their tasks itself."""

from __future__ import annotations

from msgspec import Struct

from cutline.fleet.cores import cores_of
from cutline.storage.location import S3_PROTOCOLS, StoreLocation

# Up to this amount, threads of the command take less time than a JVM and its workers: on two cores, with 3.9 million
# rows in 1.2 GB, 2 to 4 s less of 11 to 20 s. With more threads than CORES_AT_MOST, Python's lock makes them wait for
# each other, so the amount is smaller. More than THREADS_MAX would mostly wait.
PAGE_BYTES_MAX, ROWS_MAX, CORES_AT_MOST, THREADS_MAX = 1536 << 20, 6_000_000, 4, 8
# Spark may have to shuffle more changes (snapshots/fold/limits.py).
CHANGES_MAX = 4_000_000
# An interrupt can't end a task's requests to other stores.
FOLDERS = ("file", "local")


class Amount(Struct, frozen=True):
    """About how much work a command's jobs have.

    `page_bytes` counts the pages of tables, or what stored rows would take in pages; None if that is unknown. `rows`
    counts the rows and changes in stored objects. `changes` counts those that Spark may have to shuffle.
    """

    page_bytes: int | None = None
    rows: int = 0
    changes: int = 0

    def __add__(self, other: Amount) -> Amount:
        size = None if self.page_bytes is None or other.page_bytes is None else self.page_bytes + other.page_bytes
        return Amount(size, self.rows + other.rows, self.changes + other.changes)


def is_for_command(amount: Amount, master: str, store: StoreLocation) -> bool:
    """Whether the command runs the tasks itself: a small amount, no executors, and a store in a folder or on S3.

    Also false for a `master` that Spark does not know.
    """
    protocol, separator, _ = store.url.partition("://")
    is_stoppable = not separator or protocol in FOLDERS or protocol in S3_PROTOCOLS
    cores = cores_of(master)
    if cores is None or not is_stoppable or amount.page_bytes is None:
        return False
    share = min(CORES_AT_MOST / min(cores, THREADS_MAX), 1)
    is_small = amount.page_bytes <= PAGE_BYTES_MAX * share and amount.rows <= ROWS_MAX * share
    return is_small and amount.changes <= CHANGES_MAX
