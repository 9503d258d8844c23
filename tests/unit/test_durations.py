from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cutline.fleet.units import Duration, Interval, duration_text


@pytest.mark.parametrize(("text", "seconds"), [
    ("24h", 86400), ("30 min", 1800), ("30min", 1800), ("1.5d", 129600), ("0", 0), ("0s", 0), (" 7 d ", 604800),
])  # fmt: skip
def test_a_duration_is_parsed(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize(("seconds", "text"), [
    (5, "5 s"), (2.5, "2.5 s"), (0, "0 s"), (90, "90 s"), (5400, "90 min"), (3600, "1 h"), (129600, "36 h"),
    (86400, "1 day"), (30 * 86400, "30 days"), (36_500 * 86400, "36,500 days"),
])  # fmt: skip
def test_a_duration_is_shown_in_the_largest_unit_that_needs_no_fraction(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1 year", "1h30min", "30m", "1,5h", "1H"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as 24h"):
        Duration.parse(text)


@pytest.mark.parametrize(("text", "meant"), [
    ("30m", "30min"), ("1 minute", "1min"), ("1H", "1h"), ("2 weeks", "14d"), ("1.5hours", "1.5h"), ("9sec", "9s"),
])  # fmt: skip
def test_an_unknown_unit_is_answered_with_the_one_that_was_meant(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"or 7d: write {meant}$"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["1M", "1 year", "1h30min", "24"])
def test_nothing_is_suggested_if_it_is_not_known_what_was_meant(text: str) -> None:
    with pytest.raises(ValueError, match=r"or 7d$"):
        Duration.parse(text)


@pytest.mark.parametrize(("text", "seconds"), [("never", 0), ("weekly", 604800), ("monthly", 2592000), ("90s", 90)])
def test_an_interval_is_a_word_or_a_duration(text: str, seconds: float) -> None:
    assert Interval.parse(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "0.0 h"])
def test_never_is_written_as_a_word(text: str) -> None:
    with pytest.raises(ValueError, match='write "never"'):
        Interval.parse(text)


def test_no_length_of_time_leads_out_of_the_calendar() -> None:
    longest = timedelta(seconds=Duration.parse("36500d"))
    assert (datetime.now(UTC) - longest).year > 1900
    assert (datetime.now(UTC) + longest).year < 2200
    for text in ("36501d", "99999999999h", "9" * 400 + "d"):
        with pytest.raises(ValueError, match="more than 36,500 days"):
            Duration.parse(text)
