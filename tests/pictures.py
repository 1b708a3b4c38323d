"""Pictures of the dashboards, drawn by Grafana's own components in a headless Chromium from a running Prometheus.

Run by ``make pictures``: starts the live fleet, waits until its faults are told, and draws every dashboard into
``docs/pictures``. See ``grafana/pictures`` for what draws.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import backends
from live_fleet import GPU_JOB, LEAKING_GPU, SCRAPE_INTERVAL, live_fleet

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "grafana" / "pictures"
DASHBOARDS = ROOT / "grafana" / "dashboards"
KEPT = ROOT / "docs" / "pictures"
BUILD_SECONDS, DRAW_SECONDS, LEAK_SECONDS = 120.0, 300.0, 120.0
FILLED, SHOWN_FILLED = "max(job:torchmem_memory_filled_ratio:max)", 0.9
SHOWN = {
    "torchmem-fleet": {},
    "torchmem-job": {"train_job": GPU_JOB},
    "torchmem-rank": {"train_job": GPU_JOB, "rank": str(LEAKING_GPU)},
    "torchmem-itself": {},
}
"""The dashboards, each with the variables that it is opened with."""


class Panel(NamedTuple):
    """What a panel showed.

    Attributes:
        state: ``data``, ``empty`` or ``error``.
        reason: what it said instead of data.
        ink: the share of it, below its title, that is not background.
    """

    dashboard: str
    title: str
    kind: str
    state: str
    reason: str
    ink: float


def missing():
    """What drawing needs and this machine lacks, or None."""
    if not shutil.which("node"):
        return "node is missing"
    if not (PROGRAM / "node_modules" / ".installed").is_file():
        return "grafana/pictures is not installed: `make tools` does that where npm is"
    return None


def build():
    """Bundles the page that is drawn, from its sources as they are now."""
    _run(["build.mjs"], BUILD_SECONDS)


def draw(url, chromium, folder, name, *, minutes):
    """Draws one dashboard.

    Args:
        url: Prometheus.
        chromium: path of a headless Chromium.
        folder: where the picture goes, as ``NAME.png``.
        name: of ``SHOWN``.
        minutes: how far back it looks.

    Returns:
        its panels.

    Raises:
        RuntimeError: it could not be drawn.
    """
    variables = [option for pair in SHOWN[name].items() for option in ("--var", "=".join(pair))]
    where = ["--prometheus", url, "--chromium", chromium, "--out", str(folder)]
    when = ["--minutes", str(minutes), "--scrape", SCRAPE_INTERVAL.removesuffix("s")]
    said = _run(["draw.mjs", *where, *when, *variables, str(DASHBOARDS / f"{name}.json")], DRAW_SECONDS)
    rows = [json.loads(line) for line in said.splitlines()]
    return [Panel(name, row["panel"], row["type"], row["state"], row.get("reason", ""), row["ink"]) for row in rows]


def _run(arguments, seconds):
    # NODE_OPTIONS and the like are the user's own business, not this program's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
    command = ["node", *arguments]
    done = subprocess.run(
        command, cwd=PROGRAM, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def main():
    """Draws all dashboards of a fleet into ``docs/pictures``."""
    if lacking := missing():
        sys.exit(lacking)
    build()
    KEPT.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        live_fleet(backends.find_program("prometheus"), Path(folder)) as fleet,
    ):
        fleet.wait_until_learned()
        fleet.go_wrong()
        fleet.wait_until_told()
        backends.wait_until(lambda: fleet.server.value(FILLED) > SHOWN_FILLED, "the leak", LEAK_SECONDS, 1)
        for name in SHOWN:
            draw(fleet.url, backends.find_program("chromium-headless-shell"), KEPT, name, minutes=fleet.minutes)
            sys.stdout.write(f"{KEPT / name}.png\n")


if __name__ == "__main__":
    main()
