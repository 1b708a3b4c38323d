"""The sidecar's log: one line an event on standard error, in logfmt or JSON.

Invariants: a line is a line: whatever text an event carries, its control characters are escaped and an exception's
traceback is one field; a log that cannot be written costs no request.

The standard library's loggers carry the events, so that those of other libraries come out alike. structlog would add
0.15 s to the start, and its logfmt lets control characters through.

Known limit: a reader of the log that stops reading, without closing it, blocks whoever logs.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone

FORMATS = ("logfmt", "json")
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}

_FIELDS = "torchmem_fields"
_LEVEL_NAMES = {level: name for name, level in LEVELS.items()}


def log(logger: logging.Logger, level: int, message: str, **fields: object) -> None:
    """An event with fields of its own."""
    logger.log(level, "%s", message, extra={_FIELDS: fields})


def configure(log_format: str, level: str) -> None:
    """Sends what every logger of this process says to standard error.

    Args:
        log_format: one of ``FORMATS``.
        level: one of ``LEVELS``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(_json if log_format == "json" else _logfmt))
    logging.basicConfig(handlers=[handler], level=LEVELS[level], force=True)
    logging.getLogger("asyncio").setLevel(max(LEVELS[level], logging.INFO))  # its details are its developers'
    logging.captureWarnings(capture=True)
    logging.raiseExceptions = False


class _Formatter(logging.Formatter):
    """From a record to a line."""

    def __init__(self, line: Callable[[Mapping[str, object]], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": _LEVEL_NAMES.get(record.levelno, "error"),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        event.update((name, value) for name, value in getattr(record, _FIELDS, {}).items() if name not in event)
        if record.exc_info and record.exc_info[0] is not None:
            event["exception"] = self.formatException(record.exc_info)
        return self._line(event)


def _json(event: Mapping[str, object]) -> str:
    return json.dumps(event, default=str)


def _logfmt(event: Mapping[str, object]) -> str:
    return " ".join(f"{name}={_word(value)}" for name, value in event.items())


def _word(value: object) -> str:
    """A value as it is where that is plain, else in the quotes and escapes of JSON."""
    text = json.dumps(value) if isinstance(value, bool) else str(value)
    if text and text.isprintable() and not any(character in ' ="\\' for character in text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
