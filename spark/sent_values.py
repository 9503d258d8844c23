"""Send values to the tasks of jobs."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from cutline.spark.driver_session import runs_in_driver
from cutline.spark.task_processes import InDriver
from cutline.storage.process_limits import NoSpaceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The JVM writes its files in pieces of up to this size.
ROOM_BYTES = 1 << 20


class _Packed(Struct, frozen=True):
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
    spark.io.encryption.enabled, as on every cluster, pyspark can send only bytes. The JVM then writes them to a file,
    and if it can't, pyspark reports only that the JVM reads no more of them. Raises NoSpaceError if there is no room.
    """
    if runs_in_driver(session):
        return InDriver(value)
    context = session.sparkContext
    try:
        return context.broadcast(_Packed(value))
    except pickle.PicklingError as error:
        if shutil.disk_usage(context._temp_dir).free < ROOM_BYTES:
            raise NoSpaceError("Spark could not write a value for its tasks") from error
        raise


@contextmanager
def sending(session: SparkSession, value: Any) -> Iterator[Any]:
    """Like `broadcast`, but executors may forget the value at the end of the block, after the jobs that use it."""
    sent = broadcast(session, value)
    try:
        yield sent
    finally:
        sent.unpersist()
