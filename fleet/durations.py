"""Lengths of time as people write them."""

from __future__ import annotations

import re

UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def seconds_from_text(text: str) -> float:
    """The seconds of `24h`, `90 min`, `1.5d`, `0`; ValueError for anything else."""
    if text.strip() == "0":
        return 0.0
    match = DURATION.fullmatch(text.strip())
    if match is None or match[2] not in UNIT_SECONDS:
        raise ValueError(f"{text!r} is no time such as 24h, 30min or 7d")
    return float(match[1]) * UNIT_SECONDS[match[2]]
