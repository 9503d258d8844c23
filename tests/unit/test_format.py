"""Numbers and times in the forms that people read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cutline.cli.main import COMMANDS
from cutline.cli.output.tables import (
    COMMAND_NAMES,
    age_text,
    count_text,
    name_fleet,
    quantity_is,
    quantity_text,
    seconds_text,
    size_text,
    time_text,
)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (12 * 1024**3, "12.0 GiB"),
        (5000 * 1024**5, "5000.0 PiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_keeps_it_below_1024(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (86400 * 3 + 3600 * 4, "3 d 04 h"),
    ],
)
def test_a_duration_has_two_parts_at_most(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(seconds=-5), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(minutes=59), "59 min ago"),
        (timedelta(hours=23, minutes=59), "23 h ago"),
        (timedelta(days=12), "12 d ago"),
    ],
)
def test_an_age_is_in_its_largest_unit(ago: timedelta, text: str) -> None:
    assert age_text(NOW - ago, now=NOW) == text


def test_the_verb_follows_the_number() -> None:
    assert [quantity_is(amount, "nodes") for amount in (0, 1, 2)] == ["0 nodes are", "1 node is", "2 nodes are"]


def test_counts_are_grouped_and_bytes_are_sizes() -> None:
    assert count_text(1234567) == "1,234,567"
    assert quantity_text(1234567, "rows") == "1,234,567 rows"
    assert [quantity_text(number, "rows") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert quantity_text(12, "") == "12"
    assert quantity_text(2048, "bytes") == "2.0 KiB"


def test_a_time_is_rfc_3339_in_utc() -> None:
    moment = datetime(2026, 1, 2, 4, 4, 5, 678900, tzinfo=timezone(timedelta(hours=1)))
    assert time_text(moment) == "2026-01-02T03:04:05.678Z"
    with pytest.raises(ValueError, match="has no zone"):
        time_text(datetime(2026, 1, 2))  # a time without a zone is what is refused


def test_the_file_is_named_in_commands_and_not_in_names_of_snapshots() -> None:
    assert {*COMMAND_NAMES, "demo"} == COMMANDS.keys()
    for name in COMMAND_NAMES:
        assert name_fleet(f"it is dead: snapshot {name} x", "f.toml") == f"it is dead: snapshot --fleet f.toml {name} x"
    for text in ("no outcome yet: snapshot watch-2026 is not committed", "yet: snapshot nightly is not committed"):
        assert name_fleet(text, "f.toml") == text
