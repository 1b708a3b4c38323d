"""The dashboards, as code: one module each, over shared panels and tables."""

from __future__ import annotations

from generator.dashboards import fleet, itself, job, rank
from generator.dashboards.page import text
from generator.settings import DEFAULTS, Settings

FOLDER = "dashboards"


def files(settings: Settings = DEFAULTS) -> dict[str, str]:
    """Contents by path below ``grafana``."""
    pages = (one.page(settings) for one in (fleet, job, rank, itself))
    return {f"{FOLDER}/{page.uid}.json": text(page) for page in pages}
