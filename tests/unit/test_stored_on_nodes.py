"""What Cutline stores on nodes has the bytes that every version has written there."""

from __future__ import annotations

import json

import pytest

from cutline.fleet.record import Time, fields_of, from_json
from cutline.nodes.read_only import Frozen, ReadOnlySetting
from cutline.wal.cut.markers import Marker, marker_from_bytes

FROZEN = Frozen(
    "o-1", "last", Time("2026-11-20T01:02:03.004Z"), (ReadOnlySetting(None, None), ReadOnlySetting("ü", "off"))
)
COMMENT = (
    '{"schema": "cutline/frozen/1", "operation": "o-1", "snapshot": "last", "since": "2026-11-20T01:02:03.004Z",'
    ' "before": [{"role": null, "value": null}, {"role": "\\u00fc", "value": "off"}]}'
)


def test_a_marker_has_its_bytes_and_is_read_with_more_fields() -> None:
    marker = Marker("chain", "cut", "start")
    assert marker.to_bytes() == b'{"chain": "chain", "cut": "cut", "kind": "start"}'
    assert marker_from_bytes(b'{"chain": "chain", "cut": "cut", "kind": "start", "later": 1}') == marker


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"chain": "c", "cut": "k"}', b'{"chain": 1, "cut": "k", "kind": "x"}', b"\xff"]
)
def test_what_is_not_a_marker_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a marker"):
        marker_from_bytes(content)


def test_the_record_of_a_freeze_has_its_text_and_is_read_with_more_fields() -> None:
    assert json.dumps(fields_of(FROZEN)) == COMMENT
    assert from_json(COMMENT, Frozen) == FROZEN
    assert from_json(COMMENT[:-1] + ', "later": 1}', Frozen) == FROZEN
