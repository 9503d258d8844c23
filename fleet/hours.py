"""The hours of the day in which `watch` begins heavy work ([limits] hours in fleet.toml)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

from msgspec import Struct

FORM = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)(?: (\S+))?")
# A window begins on this day, or began on the day before; the next one begins at the latest on the day after.
DAYS = (-1, 0, 1)


class Hours(Struct, frozen=True):
    """A daily window from `begin` up to, but not including, `end`, on the clocks of a time zone.

    If `end` is not later than `begin`, the window ends on the next day. On a day on which clocks are changed, it is as
    much shorter or longer.
    """

    begin: time
    end: time
    zone: tzinfo
    text: str

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse `22:00-06:00` (UTC) or `22:00-06:00 Europe/Berlin`; raise ValueError for anything else."""
        if (match := FORM.fullmatch(text)) is None:
            raise ValueError(f'{text!r} are not hours such as "22:00-06:00" or "22:00-06:00 Europe/Berlin"')
        try:
            begin, end = time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))
        except ValueError:
            raise ValueError(f"{text!r} contains a time that no clock shows") from None
        if begin == end:
            raise ValueError(f"{text!r} begin and end at the same time")
        return cls(begin, end, _zone(match[5] or "UTC"), match[0])

    def opens_at(self, moment: datetime) -> datetime:
        """Return `moment` (with a time zone) if it is in a window, otherwise the begin of the next window in UTC."""
        today = moment.astimezone(self.zone).date()
        for day in DAYS:
            date = today + timedelta(days=day)
            last = date if self.begin < self.end else date + timedelta(days=1)
            # Arithmetic on times in the same zone ignores changes of the clock, so compare them in UTC.
            begin = datetime.combine(date, self.begin, self.zone).astimezone(UTC)
            end = datetime.combine(last, self.end, self.zone).astimezone(UTC)
            if moment < end:
                return max(moment, begin)
        raise AssertionError("tomorrow's window has not ended")


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        # A machine may have no database of time zones.
        return UTC
    try:
        return ZoneInfo(name)
    # ValueError: a name that leads out of the folder of zones; OSError: the name of a folder.
    except (KeyError, ValueError, OSError):
        raise ValueError(f"time zone {name!r} is not known on this machine") from None
