from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.wal.cut.markers import Marker, marker_from_bytes


@given(st.text(), st.text(), st.sampled_from(["start", "finish"]))
def test_a_marker_round_trips_through_its_bytes(chain: str, cut: str, kind: str) -> None:
    marker = Marker(chain, cut, kind)
    assert marker_from_bytes(marker.to_bytes()) == marker


@pytest.mark.parametrize(
    "content",
    [
        b"", b"hello", b"\xff\xfe\x00", b"[]", b"7", b"null", b'"start"', b"{}",
        b'{"chain": "c", "cut": "1"}', b'{"chain": [], "cut": "1", "kind": "start"}',
        b'{"chain": "c", "cut": 1, "kind": "start"}', b'{"chain": null, "cut": null, "kind": null}',
    ],
)  # fmt: skip
def test_a_foreign_message_under_our_prefix_is_not_a_marker(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the contract names no narrower class
        marker_from_bytes(content)
