"""Records: the values in stored documents, read and written by msgspec.

Reading is strict: every value has the type of its field, no field is missing, and no field is unknown, because an
unknown field may change the meaning of others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, lru_cache
from typing import Annotated, Any

import msgspec

from cutline.fleet.lsn import Lsn

_EXAMINING = threading.Lock()
INTEGER_MAX = 2**63 - 1
TIME_PATTERN = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$"
TIME = re.compile(TIME_PATTERN)
# The end of a pattern. A `$` alone would also match before a final newline.
END = r"$(?!\n)"

# 64 bits, as in PostgreSQL and Parquet.
Integer = Annotated[int, msgspec.Meta(ge=-INTEGER_MAX - 1, le=INTEGER_MAX)]
# No command runs for thirty years, and JSON has no infinity.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=INTEGER_MAX)]


class Time(str):
    """A valid time in RFC 3339 format with an offset from UTC, kept as text so that it is written as it was read."""

    __slots__ = ()

    @classmethod
    def of(cls, moment: datetime) -> Time:
        """Format `moment` to the millisecond; raise ValueError if it has no time zone."""
        return cls.parse(moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"))

    @classmethod
    def exactly(cls, moment: datetime) -> Time:
        """Format `moment` to the microsecond, as PostgreSQL does; raise ValueError if it has no time zone."""
        return cls.parse(moment.isoformat(timespec="microseconds").replace("+00:00", "Z"))

    @classmethod
    def parse(cls, text: str) -> Time:
        """Parse the time in `text`; raise ValueError if it is invalid."""
        return _parse_time(text)


# The commits of a chain repeat the times of up to 64 others.
@lru_cache(maxsize=1 << 12)
def _parse_time(text: str) -> Time:
    if not TIME.fullmatch(text):
        raise ValueError(f"{text!r} is not a time such as 2026-11-20T01:02:03Z")
    # The pattern allows dates such as February 30, and readers compare times in UTC.
    try:
        datetime.fromisoformat(text).astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{text!r} is outside the range of valid times") from error
    return Time(text)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value in a stored document: immutable, compared by its fields."""


def to_builtins(value: Any) -> Any:
    """Convert the value to JSON types; records become objects with their fields in order."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode)


def fields_of(record: Record) -> dict[str, Any]:
    """Convert the record to a JSON object."""
    fields: dict[str, Any] = to_builtins(record)
    return fields


def to_json(value: Any) -> bytes:
    """Encode the value as JSON in UTF-8, without spaces; records become objects with their fields in order."""
    return _ENCODER.encode(value)


def from_json(body: bytes | str, kind: Any) -> Any:
    """Decode a value of `kind`; raise msgspec.DecodeError, or ValidationError naming the invalid field."""
    return _decoder(kind).decode(body)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    # msgspec inspects a type when it is first used. If two threads do this at the same time, the process crashes.
    with _EXAMINING:
        return _new_decoder(kind)


@cache
def _new_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_decode)


def json_schema(kinds: list[Any]) -> tuple[tuple[dict[str, Any], ...], Mapping[str, Any]]:
    """Return the JSON Schemas of the kinds, and the definitions that they share."""
    return msgspec.json.schema_components(kinds, schema_hook=_schema_of, ref_template="#/$defs/{name}")


def _encode(value: Any) -> Any:
    if isinstance(value, Lsn | Time):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Lsn or kind is Time:
        if not isinstance(value, str):
            what = "a WAL position" if kind is Lsn else "a time"
            raise ValueError(f"expected {what}, got {type(value).__name__}")
        return kind.parse(value)
    raise NotImplementedError(kind.__name__)


def _schema_of(kind: type[Any]) -> dict[str, Any]:
    if kind is Lsn:
        return {"type": "string", "pattern": "^[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}$"}
    if kind is Time:
        return {"type": "string", "format": "date-time", "pattern": TIME_PATTERN}
    raise NotImplementedError(kind.__name__)


_ENCODER = msgspec.json.Encoder(enc_hook=_encode)
