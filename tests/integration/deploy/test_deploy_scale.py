"""The page on the size of stores: its configurations are ones that the real servers take."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import deploys

PAGE = Path(__file__).resolve().parents[3] / "deploy" / "scale.md"
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_page_has_its_figures():
    """The page would speak of figures that are not there."""
    _, begin, rest = PAGE.read_text().partition("<!-- measured: begin -->")
    figures, end, _ = rest.partition("<!-- measured: end -->")
    assert begin
    assert end
    assert all(
        f"| {ranks} | {level} |" in figures for ranks in ("1,000", "16,000") for level in ("core", "standard", "full")
    )


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_prometheus_takes_each_configuration(promtool, tmp_path, number):
    """Who copies an example would be told by Prometheus that it is wrong."""
    path = tmp_path / "prometheus.yml"
    path.write_text(BLOCKS[number])
    line = [promtool, "check", "config", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    deploys.passed("promtool", "scale.md")


def test_victoria_metrics_takes_the_last(victoria_metrics, tmp_path):
    """Who copies the example for VictoriaMetrics would be told by it that it is wrong."""
    path = tmp_path / "torchmem.yml"
    path.write_text(BLOCKS[-1])
    line = [victoria_metrics, "-dryRun", "-promscrape.config.strictParse", f"-promscrape.config={path}"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
