from __future__ import annotations

import pytest

from fleet.durations import Duration


@pytest.mark.parametrize(("text", "seconds"), [
    ("24h", 86400), ("30 min", 1800), ("30m", 1800), ("1.5d", 129600), ("0", 0), ("0s", 0), (" 7 d ", 604800),
])  # fmt: skip
def test_a_duration_is_parsed(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1 year", "1h30m", "1,5h", "1H"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length of time such as 24h"):
        Duration.parse(text)
