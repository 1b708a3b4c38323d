"""``deploy/prometheus``: the real programs take the examples, with the files that these name in their places."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

import deploys

FOLDER = deploys.DEPLOY / "prometheus"
GRAFANA = deploys.ROOT / "grafana"


@pytest.fixture
def folder(tmp_path):
    """A folder with what the examples look for beside them."""
    (tmp_path / "targets").mkdir()
    shutil.copy(FOLDER / "targets.json", tmp_path / "targets")
    for name in ("rules", "alerts"):
        (tmp_path / name).symlink_to(GRAFANA / name)
    for name in ("ca.crt", "token"):
        (tmp_path / name).touch()
    return tmp_path


def check(promtool, path):
    """Raises what promtool says against a configuration, its rules and targets."""
    command = [promtool, "check", "config", "--lint-fatal", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "2 rule files found" in said
    assert "WARNING" not in said


@pytest.mark.parametrize("name", ["files.yml", "files-tls.yml"])
def test_promtool_accepts(name, promtool, folder):
    """Prometheus would not start."""
    shutil.copy(FOLDER / name, folder)
    check(promtool, folder / name)
    deploys.passed("promtool", f"prometheus/{name}", "prometheus/targets.json")


def test_discovery_in_kubernetes(promtool, victoria_metrics, folder):
    """Prometheus would not start, or find nothing. Debian's promtool knows no Kubernetes: another reads that part."""
    config = yaml.safe_load((FOLDER / "kubernetes.yml").read_text())
    path = folder / "kubernetes.yml"
    path.write_text(yaml.safe_dump({name: part for name, part in config.items() if name != "rule_files"}))
    command = [victoria_metrics, f"-promscrape.config={path}", "-promscrape.config.strictParse", "-dryRun"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (scrape,) = config["scrape_configs"]
    assert scrape.pop("kubernetes_sd_configs")
    path.write_text(yaml.safe_dump(config))
    check(promtool, path)
    deploys.passed("victoria-metrics", "prometheus/kubernetes.yml")
