"""Send values to the tasks of jobs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cutline.spark.driver_session import runs_in_driver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class InDriver:
    """A value for tasks that run in the driver, with the attributes of a broadcast that they use."""

    value: Any

    def unpersist(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A value that is pickled as plain bytes. Unpickling returns the value itself, with read-only arrays."""

    value: Any

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes, list[bytes]]]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        return _unpack, (head, [buffer.raw().tobytes() for buffer in buffers])


def _unpack(head: bytes, buffers: list[bytes]) -> Any:
    return pickle.loads(head, buffers=buffers)


def broadcast(session: SparkSession, value: Any) -> Any:
    """Send a value to every executor whose tasks refer to the result; tasks read it from the result's `value`.

    Tasks in the driver get the value itself.

    pickle passes the memory of Arrow tables, and of numpy arrays of 64 KiB or more, as PickleBuffers. With
    spark.io.encryption.enabled, as on every cluster, pyspark can send only bytes.
    """
    return InDriver(value) if runs_in_driver(session) else session.sparkContext.broadcast(_Packed(value))


@contextmanager
def sending(session: SparkSession, value: Any) -> Iterator[Any]:
    """Like `broadcast`, but executors may forget the value at the end of the block, after the jobs that use it."""
    sent = broadcast(session, value)
    try:
        yield sent
    finally:
        sent.unpersist()
