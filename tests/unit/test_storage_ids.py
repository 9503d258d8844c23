from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.storage.digest import digest
from cutline.storage.ids import new_operation_id
from cutline.storage.store import check_key

NOW = datetime(2026, 11, 20, 7, 43, 43, 999_999, tzinfo=UTC)


def test_an_id_is_the_utc_second_and_a_random_number() -> None:
    assert re.fullmatch("20261120T074343Z-[0-9a-f]{10}", new_operation_id(NOW))


def test_ids_of_the_same_second_differ() -> None:
    # One in 110 random numbers would be digits alone.
    ids = {new_operation_id(NOW) for _ in range(10_000)}
    assert len(ids) == 10_000
    assert not [one for one in ids if one.partition("-")[2].isdigit()]


@given(st.datetimes(min_value=datetime(2000, 1, 1)), st.integers(-14, 14), st.integers(1, 10**9))
def test_ids_sort_by_time_in_any_time_zone(first: datetime, hours: int, later_seconds: int) -> None:
    zone = timezone(timedelta(hours=hours))
    earlier = first.replace(year=2000 + first.year % 100, tzinfo=UTC)
    later = (earlier + timedelta(seconds=later_seconds)).astimezone(zone)
    assert new_operation_id(earlier) < new_operation_id(later)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        new_operation_id(NOW.replace(tzinfo=None))


def test_an_id_can_be_part_of_a_key() -> None:
    assert check_key(f"operations/{new_operation_id(NOW)}/intent.json")


def test_the_digest_is_sha_256_in_hex() -> None:
    # The test vectors of FIPS 180-2.
    assert digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
