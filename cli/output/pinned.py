"""Pins as JSON, in the output of `keep`, `list` and `show`."""

from __future__ import annotations

from typing import Any

from cutline.fleet.record import to_builtins
from cutline.snapshots.records.pins import StoredPin


def pin_document(pin: StoredPin) -> dict[str, Any]:
    """Return a pin as JSON. All fields are null except `id` and `problem` if the pin can't be read."""
    found = to_builtins(pin.pin) if pin.pin else {}
    fields = ("increment", "at", "by", "until")
    return {
        "id": pin.id,
        **{field: found.get(field) for field in fields},
        "reason": pin.pin.reason if pin.pin else None,
        "problem": pin.problem,
    }
