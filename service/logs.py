"""How the service logs: lines of text, or one JSON object a line."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, and what the call added."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_config(form: str, level: str) -> dict[str, Any]:
    """What logging.config.dictConfig is told, for uvicorn and for tilewise alike; everything goes to stderr."""
    text = {"format": "%(levelname)s:     %(message)s"}
    formatter: dict[str, Any] = {"()": "tilewise.service.logs.JsonFormatter"} if form == "json" else text
    own = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {"uvicorn": own, "uvicorn.error": own, "tilewise": own},
    }
