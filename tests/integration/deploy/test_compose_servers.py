"""``deploy/compose`` with real servers in the places of its containers: the configuration that is mounted, at addresses
of this machine."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

import backends
import deploys
import sidecars
from records import living, make_record

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def services(docker_compose):
    """The services by name, as Docker Compose understands them."""
    command = [docker_compose, "-f", deploys.DEPLOY / "compose" / "compose.yaml", "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["services"]


def container(service, root, addresses):
    """Lays out what a service mounts below a folder; returns its arguments with the places that they have there."""
    for volume in service["volumes"]:
        place = root / volume["target"].lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if volume["type"] == "bind" and Path(volume["source"]).is_file():
            text = Path(volume["source"]).read_text()
            for name, address in addresses.items():
                text = text.replace(name, address)
            place.write_text(text)
        elif volume["type"] == "bind":
            place.symlink_to(volume["source"])
    return [argument.replace("=/", f"={root}/") for argument in service["command"]]


def ask(server, path):
    """What an API of Prometheus answers."""
    return json.loads(backends.get(f"{server.url}/api/v1/{path}"))["data"]


def healths(server):
    """What Prometheus says of its rules."""
    return {rule["health"] for group in ask(server, "rules")["groups"] for rule in group["rules"]}


def test_the_stack_works_together(services, prometheus, alertmanager, tmp_path):
    """`docker compose up` would give servers that do not find each other, or know no rules."""
    told, asked = backends.free_address(), backends.free_address()
    with (
        living(tmp_path / "records", make_record(written_at=time.time())),
        sidecars.running(tmp_path / "records") as one,
    ):
        addresses = {"sidecar:20471": f"127.0.0.1:{one.port}", "alertmanager:9093": told, "15s": "1s"}
        alerting = [
            *backends._with_its_own_files(alertmanager),
            *container(services["alertmanager"], tmp_path / "alertmanager", {}),
            f"--web.listen-address={told}",
        ]
        scraping = [
            prometheus,
            *container(services["prometheus"], tmp_path / "prometheus", addresses),
            f"--web.listen-address={asked}",
        ]
        log = tmp_path / "log"
        with backends.running(alerting, log) as first, backends.running(scraping, log) as second:
            backends.wait_for(backends.Server(first, told, log), lambda: backends.get(f"http://{told}/-/ready"))
            server = backends.Server(second, asked, log)
            backends.wait_for(server, lambda: backends.get(f"http://{asked}/-/ready"))
            backends.wait_until(lambda: server.value("torchmem_rank_up") == 1, "the first scrape")
            backends.wait_until(lambda: server.value("device:torchmem_memory_filled_ratio:max"), "the first rule")
            backends.wait_until(lambda: ask(server, "alertmanagers")["activeAlertmanagers"], "the way to Alertmanager")
            backends.wait_until(lambda: "unknown" not in healths(server), "the first evaluation of every rule")
            assert healths(server) == {"ok"}
            groups = {group["name"] for group in ask(server, "rules")["groups"]}
            assert groups == {"torchmem.rules", "torchmem.alerts"}
