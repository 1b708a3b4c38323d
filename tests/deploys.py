"""Which tool checks which file below ``deploy/``, and which of them passed in this run of the tests.

``CHECKS`` is the plan: a test of a tool takes its files from ``files(tool)`` and calls ``passed(tool, ...)`` once the
tool has accepted them. A unit test holds the plan against the folder, so that no file is without a tool;
``deploy/CHECKED.md`` is the plan as a table (``python tests/deploys.py`` writes it); the summary of a test run lists
what has passed in it.

Invariant: standard library only.
"""

from __future__ import annotations

import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
CHECKED = DEPLOY / "CHECKED.md"

CHECKS = {
    "kubectl kustomize": ("kubernetes/**/*.y*ml",),
    "kubernetes-validate": (
        "kubernetes/base/[!k]*.yaml",
        "kubernetes/overlays/*/[!k]*.yaml",
        "kubernetes/sidecar*/[!kc]*.yaml",
        "helm/torchmem-exporter/templates/[!_p]*.yaml",
    ),
    "@kubernetes-models/prometheus-operator": (
        "kubernetes/monitoring*/[!k]*.yaml",
        "helm/torchmem-exporter/templates/p*.yaml",
    ),
    "kubeflow-training": ("kubernetes/overlays/pytorchjob/pytorchjob.yaml",),
    "kubeflow-trainer-api": ("kubernetes/overlays/jobset/jobset.yaml",),
    "torchmem-exporter": ("kubernetes/sidecar-tls/web-config.yml", "slurm/web.yml.example"),
    "helm": ("helm/torchmem-exporter/**/*",),
    "comparison with grafana/": (
        "kubernetes/monitoring/prometheusrule.yaml",
        "helm/torchmem-exporter/files/**/*",
    ),
    "docker-compose": ("compose/compose.yaml",),
    "promtool": (
        "compose/prometheus.yml",
        "prometheus/f*.yml",
        "prometheus/targets.json",
        "slurm/prometheus.yml",
        "scale.md",
    ),
    "amtool": ("compose/alertmanager.yml",),
    "victoria-metrics": ("prometheus/kubernetes.yml", "otel/scrape.yaml"),
    "Slurm": ("slurm/*.sh", "slurm/*.py", "slurm/train.sbatch", "slurm/torchmem.conf"),
    "shellcheck": ("slurm/*.sh", "slurm/train.sbatch", "slurm/torchmem.conf"),
    "systemd-analyze": ("systemd/*.service",),
    "its restrictions put on": ("systemd/*",),
    "hadolint": ("image/Containerfile",),
    "buildah": ("image/Containerfile", "image/*ignore"),
    "rotel": ("otel/agent.yaml", "otel/rotel.env"),
    "what it names": ("README.md",),
    "comparison with the plan": ("CHECKED.md",),
}
"""For each tool, patterns of the files that it is given, relative to ``deploy/``; ``**`` is any number of folders."""

_passed: dict[str, set[str]] = {}


def all_files():
    """Every file below ``deploy/``, as paths relative to it."""
    return sorted(path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file())


@functools.cache
def files(tool):
    """The files that a tool has to check, as paths relative to ``deploy/``.

    Raises:
        AssertionError: a pattern names no file.
    """
    found = set()
    for pattern in CHECKS[tool]:
        matching = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.glob(pattern) if path.is_file()}
        assert matching, f"{tool} is to check {pattern}, which matches nothing below deploy/"
        found |= matching
    return sorted(found)


def tools(file):
    """The tools that check a file."""
    return [tool for tool in CHECKS if file in files(tool)]


def passed(tool, *checked):
    """Notes that a tool has accepted files; a path relative to ``deploy/`` each."""
    assert tool in CHECKS, f"{tool} is not in CHECKS of tests/deploys.py"
    for file in checked:
        _passed.setdefault(file, set()).add(tool)


def summary():
    """A line for each file that a tool has accepted in this run of the tests."""
    return [f"{file}: {', '.join(tool for tool in CHECKS if tool in _passed[file])}" for file in sorted(_passed)]


def table():
    """The plan as the text of ``deploy/CHECKED.md``."""
    lines = [
        "# What checks each file here",
        "",
        "Written by `make generate` from `CHECKS` in `tests/deploys.py`. The tests fail on a file that is not in it,",
        "and end with a list of those that passed.",
        "",
        "| file | checked by |",
        "| --- | --- |",
    ]
    lines += [f"| `{file}` | {', '.join(tools(file)) or '**nothing**'} |" for file in all_files()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CHECKED.touch()
    CHECKED.write_text(table())
