"""Convert numbers between numpy and Arrow by sharing buffers.

Every module that uses Arrow imports this one, directly or indirectly, so pyarrow never imports pandas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutline.columns import without_pandas

without_pandas.settle()
_TYPES: dict[Any, Any] = {
    np.dtype(np.int8): pa.int8(),
    np.dtype(np.int16): pa.int16(),
    np.dtype(np.int32): pa.int32(),
    np.dtype(np.int64): pa.int64(),
    np.dtype(np.uint64): pa.uint64(),
}
_DTYPES: dict[Any, Any] = {arrow: dtype for dtype, arrow in _TYPES.items()}


def to_arrow(values: npt.NDArray[Any], absent: npt.NDArray[np.bool_] | None = None) -> pa.Array[Any]:
    """Convert integers to an Arrow array of the same width, without copying; values are null where `absent` is true."""
    values = np.ascontiguousarray(values)
    valid = None if absent is None else _bits(~absent)
    return pa.Array.from_buffers(_TYPES[values.dtype], len(values), [valid, pa.py_buffer(values)])


def to_mask(values: npt.NDArray[np.bool_]) -> pa.Array[Any]:
    """Convert booleans to an Arrow array, for filters."""
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def to_flags(values: pa.Array[Any]) -> npt.NDArray[np.bool_]:
    """Convert an Arrow array of booleans without nulls to numpy."""
    bits = np.frombuffer(values.buffers()[1] or b"", np.uint8)
    flags = np.unpackbits(bits, count=values.offset + len(values), bitorder="little")
    return flags[values.offset :].astype(np.bool_)


def to_numpy(values: Any) -> npt.NDArray[Any]:
    """Convert an Arrow integer array or chunked array without nulls to numpy; copy only if it has several chunks."""
    if isinstance(values, pa.ChunkedArray):
        parts = [to_numpy(chunk) for chunk in values.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, _DTYPES[values.type]), *parts])
    dtype = _DTYPES[values.type]
    data = values.buffers()[1]
    if len(values) == 0 or data is None:
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(values), values.offset * dtype.itemsize)


def _bits(values: npt.NDArray[np.bool_]) -> Any:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
