"""``deploy/compose``: Docker Compose reads it without an engine, and each program in it takes its file."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

import deploys
from torchmem_exporter.cli import parse

COMPOSE = deploys.DEPLOY / "compose"


@pytest.fixture(scope="module")
def services(docker_compose):
    """The services by name, as Docker Compose understands them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "TORCHMEM_"))}
    command = [docker_compose, "-f", COMPOSE / "compose.yaml", "config", "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    deploys.passed("docker-compose", "compose/compose.yaml")
    return json.loads(done.stdout)["services"]


def mounts(service):
    """What of this checkout is mounted: place in the container -> path."""
    bound = {volume["target"]: Path(volume["source"]) for volume in service["volumes"] if volume["type"] == "bind"}
    return {target: path for target, path in bound.items() if path.is_relative_to(deploys.ROOT)}


def flag(service, name):
    """The value of a flag in a service's command."""
    (value,) = [part.partition("=")[2] for part in service["command"] if part.startswith(f"{name}=")]
    return value


def test_compose_mounts_what_is_there(services):
    """A container would start with an empty directory in the place of its configuration."""
    found = {path for service in services.values() for path in mounts(service).values()}
    assert found
    build = services["sidecar"]["build"]
    found |= {Path(build["context"]), Path(build["context"]) / build["dockerfile"]}
    assert [path for path in found if not path.exists()] == []


def test_nothing_is_reached_from_other_machines(services):
    """Whoever is in the network could read everything, and change Prometheus."""
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["published"] for port in published} == {"3000", "9090", "9093"}
    assert all(port["host_ip"] == "127.0.0.1" for port in published)


def test_containers_are_confined(services):
    """A hole in one of the servers would be one in the machine."""
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_no_service_takes_the_machine(services):
    """A server that grows would take the memory, the processes or the disk of the training beside it."""
    for name, service in services.items():
        assert 0 < int(service["mem_limit"]) <= 2 << 30, name
        assert 0 < service["pids_limit"] <= 256, name
    assert services["sidecar"]["mem_limit"] == str(384 << 20)
    assert flag(services["prometheus"], "--storage.tsdb.retention.size") == "8GB"


def test_nobody_logs_in_to_grafana(services):
    """Whoever knows the first password of `admin` could change data sources, and so ask any address."""
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"


def test_the_sidecar_accepts_its_arguments(services):
    """The sidecar would end with status 2, again and again, or not see what is mounted."""
    sidecar = services["sidecar"]
    config = parse(sidecar["command"])
    (records,) = sidecar["volumes"]
    assert records["target"] == str(config.directory)
    assert records["bind"].get("create_host_path") is not True
    assert sidecar["user"] == "1000:1000"
    assert [f"sidecar:{config.port}"] == targets(mounts(services["prometheus"])["/etc/prometheus/prometheus.yml"])


def targets(path):
    """What a configuration of Prometheus scrapes."""
    (scrape,) = yaml.safe_load(path.read_text())["scrape_configs"]
    return scrape["static_configs"][0]["targets"]


def test_promtool_accepts_the_configuration_where_it_is_mounted(services, promtool, tmp_path):
    """Prometheus would not start, or without the rules and alerts."""
    prometheus = services["prometheus"]
    for target, path in mounts(prometheus).items():
        place = tmp_path / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    config = tmp_path / flag(prometheus, "--config.file").lstrip("/")
    command = [promtool, "check", "config", "--lint-fatal", config]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rule files found" in done.stdout + done.stderr
    deploys.passed("promtool", "compose/prometheus.yml")


def test_amtool_accepts_the_configuration(services, amtool):
    """Alertmanager would not start."""
    service = services["alertmanager"]
    path = mounts(service)[flag(service, "--config.file")]
    done = subprocess.run([amtool, "check-config", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    deploys.passed("amtool", "compose/alertmanager.yml")


def test_grafana_finds_its_data_and_dashboards(services):
    """Grafana would start empty."""
    grafana = services["grafana"]
    provisioning = mounts(grafana)["/etc/grafana/provisioning"]
    (sources,) = [yaml.safe_load(file.read_text()) for file in (provisioning / "datasources").iterdir()]
    (source,) = sources["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"].strip("${}") == "PROMETHEUS_URL"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    (providers,) = [yaml.safe_load(file.read_text()) for file in (provisioning / "dashboards").iterdir()]
    (provider,) = providers["providers"]
    dashboards = mounts(grafana)[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (dashboards / home.name).is_file()
