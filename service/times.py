"""Times as answers show them."""

from __future__ import annotations

import datetime


def shown(seconds: float | None) -> str | None:
    """Seconds since 1970 as a time in UTC, ISO 8601; None stays None."""
    if seconds is None:
        return None
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
