"""The demo's two servers, the sidecar and Prometheus: how they are started and asked.

Invariant: requests stay on the loopback interface whatever proxy the environment names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from processes import LOOPBACK, DemoError, Supervisor

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 30.0
REQUEST_SECONDS = 2.0
SCRAPE_SECONDS = 1
HOLDERS = "torchmem_module_memory_step_peak_bytes"

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str) -> str | None:
    """What a server answers; None when it does not, or not with success."""
    try:
        with _opener.open(url, timeout=REQUEST_SECONDS) as response:
            body: bytes = response.read()
    except OSError:
        return None
    return body.decode()


def _wait(supervisor: Supervisor, url: str, name: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while fetch(url) is None:
        if time.monotonic() > deadline:
            raise DemoError(f"{name} did not answer at {url} within {READY_SECONDS:.0f} s")
        supervisor.tick()


def console_script(name: str) -> str:
    """The path of one of torchmem's own commands.

    Raises:
        DemoError: torchmem is not installed beside this Python.
    """
    path = Path(sys.executable).with_name(name)
    if not path.is_file():
        raise DemoError(f"{path} is missing: `make demo` installs it")
    return str(path)


class Sidecar:
    """torchmem-exporter over the demo's records."""

    def __init__(self, supervisor: Supervisor, folder: Path, records: Path, port: int) -> None:
        self.target = f"{LOOPBACK}:{port}"
        self.url = f"http://{self.target}/metrics"
        command = [console_script("torchmem-exporter"), "--dir", str(records), "--listen", self.target]
        supervisor.start("the sidecar", command, folder / "sidecar.log", os.environ, is_server=True)
        _wait(supervisor, f"http://{self.target}/healthz", "the sidecar")

    def scrape(self) -> str | None:
        """The metrics as Prometheus would read them; None when they cannot be had."""
        return fetch(self.url)


class Prometheus:
    """A real Prometheus that scrapes the sidecar."""

    def __init__(self, supervisor: Supervisor, folder: Path, program: str, target: str, port: int) -> None:
        self.url = f"http://{LOOPBACK}:{port}"
        config = folder / "prometheus.yml"
        scrape = {"job_name": "torchmem", "static_configs": [{"targets": [target]}]}
        interval = f"{SCRAPE_SECONDS}s"
        # JSON is YAML.
        config.write_text(json.dumps({"global": {"scrape_interval": interval}, "scrape_configs": [scrape]}))
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={LOOPBACK}:{port}",
        ]
        supervisor.start("Prometheus", command, folder / "prometheus.log", os.environ, is_server=True)
        _wait(supervisor, f"{self.url}/-/ready", "Prometheus")

    def page(self) -> str:
        """Address of its graph of who holds the memory of rank 0."""
        graph = {"g0.expr": f'{HOLDERS}{{rank="0"}}', "g0.tab": "0", "g0.stacked": "1", "g0.range_input": "5m"}
        return f"{self.url}/graph?{urllib.parse.urlencode(graph)}"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The samples of an instant query, as labels and value; none when it cannot be had."""
        text = fetch(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        if text is None:
            return []
        return [(row["metric"], float(row["value"][1])) for row in json.loads(text)["data"]["result"]]


def find_prometheus() -> str | None:
    """The binary that ``make tools`` unpacks, else one on PATH, else None."""
    local = ROOT / ".tools" / "usr" / "bin"
    return shutil.which("prometheus", path=str(local)) or shutil.which("prometheus")
