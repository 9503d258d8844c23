"""What `watch` says: a line with its time on stderr for each thing that happened, or a JSON line with `--json`."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from cutline.cli.output.format import name_fleet, printable
from cutline.fleet.record import Time
from cutline.storage.clock import utc_now

EVENT_SCHEMA = "cutline/watch-event/1"


def log(text: str, *, json_lines: bool, fleet_file: str | None = None, hint: str = "", **details: object) -> None:
    """Write one event, with what to do about it; `details` are in its JSON only.

    The commands of the hint get the fleet file that was given.
    """
    hint = name_fleet(hint, fleet_file, is_hint=True)
    at = Time.of(utc_now())
    if json_lines:
        line = json.dumps({"schema": EVENT_SCHEMA, "at": at, "text": text, "hint": hint, **details})
    else:
        # A hint may have several lines.
        with_hint = f"{text} (hint: {'; '.join(hint.splitlines())})" if hint else text
        line = f"{at[:19]}Z {printable(with_hint)}"
    # A disk that is full, or a terminal that is gone: the watch goes on.
    with suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
