"""Which rank and device a query asks for: ``?job=...&rank=...&device=...&live=off``.

Invariants: pure; a query is either a choice or a ``ChoiceError`` that says what is wrong with it; names are those that
the metrics' labels have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlencode

MAX_FIELDS = 8
MAX_RANK_DIGITS = 19


class ChoiceError(Exception):
    """A query that cannot be understood."""


@dataclass(frozen=True)
class Choice:
    """What is asked for; None where the query leaves it open."""

    job: str | None = None
    rank: int | None = None
    device: str | None = None
    is_live: bool = True
    """Whether the page follows the ranks by itself."""

    def of(self, job: str, rank: int, device: str | None = None) -> Choice:
        """The choice of this rank instead, and of this device if it is named."""
        return replace(self, job=job, rank=rank, device=device)

    @property
    def query(self) -> str:
        """As it is asked for; empty where all is left open."""
        fields = {"job": self.job, "rank": self.rank, "device": self.device, "live": None if self.is_live else "off"}
        asked = urlencode({name: value for name, value in fields.items() if value is not None})
        return f"?{asked}" if asked else ""


def parsed(query: str) -> Choice:
    """The choice that a query makes; fields that are none of the page's are passed over.

    Args:
        query: without its question mark, as it came.

    Raises:
        ChoiceError: a field has a value that it cannot have.
    """
    try:
        fields = parse_qs(query, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise ChoiceError(f"a query has at most {MAX_FIELDS} fields") from None
    return Choice(
        job=_only(fields, "job"),
        rank=_rank(_only(fields, "rank")),
        device=_only(fields, "device"),
        is_live=_is_live(_only(fields, "live")),
    )


def _only(fields: dict[str, list[str]], name: str) -> str | None:
    values = fields.get(name, [])
    if len(values) > 1:
        raise ChoiceError(f"{name} is given {len(values)} times")
    return values[0] if values else None


def _rank(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_RANK_DIGITS):
        raise ChoiceError("rank is a whole number from 0 on")
    return int(text)


def _is_live(text: str | None) -> bool:
    if text not in (None, "on", "off"):
        raise ChoiceError("live is on or off")
    return text != "off"
