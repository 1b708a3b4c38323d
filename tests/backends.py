"""The real servers that the sidecar's series end up in, on free ports of the loopback interface.

Each is a context manager that yields an object with the server's address and ends the process by its pid. Series are
queried as (name, sorted labels) -> value, the form that ``sidecars.series`` gives those of a scrape.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

LOOPBACK = "127.0.0.1"
TOOLS = Path(__file__).resolve().parent.parent / ".tools" / "usr" / "bin"
START_SECONDS = 30.0
END_SECONDS = 20.0
QUERY_SECONDS = 60.0
SCRAPED_BY = ("job", "instance")
"""Labels that a scrape adds."""


def find_program(name):
    """Path of a real server's binary: of ``make tools``, of a Python package, on PATH, in this order; else None."""
    if name == "rotel-agent":
        package = importlib.util.find_spec("rotel")
        return str(Path(package.origin).parent / name) if package else None
    ours = f"{TOOLS}{os.pathsep}{Path(sys.executable).parent}"
    return shutil.which(name, path=ours) or shutil.which(name)


def find_tool(name, source="`make tools` unpacks it"):
    """Path of a real server's binary; without one the test is skipped, but fails where it must be there."""
    path = find_program(name)
    if path:
        return path
    return missing(f"{name} is missing: {source}")


def missing(reason):
    """Skips the test, or fails it where nothing may be missing."""
    if os.environ.get("CI") or os.environ.get("TORCHMEM_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def free_address():
    """An address of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{probe.getsockname()[1]}"


def get(url, timeout=QUERY_SECONDS):
    """The body at an address, past any proxy.

    Raises:
        OSError: nobody answers there, or with an error.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return response.read()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error


def wait_until(is_so, what, seconds=START_SECONDS, interval=0.1):
    """Polls until a condition holds; returns what it returned.

    Raises:
        TimeoutError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not (answer := is_so()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took more than {seconds:g} s")
        time.sleep(interval)
    return answer


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen
    address: str
    log: Path

    @property
    def url(self):
        return f"http://{self.address}"

    def query(self, expression='{__name__=~"torchmem_.+"}', without=SCRAPED_BY, **parameters):
        """The series of an instant query by Prometheus' API: (name, sorted labels) -> value.

        Args:
            expression: PromQL; by default all of our series.
            without: labels to leave out.
            parameters: further ones of the API.
        """
        options = urllib.parse.urlencode({"query": expression, **parameters})
        found = {}
        for row in json.loads(get(f"{self.url}/api/v1/query?{options}"))["data"]["result"]:
            labels = {name: value for name, value in row["metric"].items() if name not in without}
            key = (labels.pop("__name__", ""), tuple(sorted(labels.items())))
            assert key not in found
            found[key] = float(row["value"][1])
        return found

    def value(self, expression):
        """The value of a query for a single number; None while there is none."""
        return next(iter(self.query(expression).values()), None)

    def metrics(self):
        """What the server says of itself: (name, sorted labels) -> value."""
        from sidecars import series

        return series(get(f"{self.url}/metrics").decode())

    def total(self, name):
        """The sum of one metric that the server has of itself."""
        return sum(value for (metric, _), value in self.metrics().items() if metric == name)


class VictoriaMetrics(Server):
    """A running VictoriaMetrics."""

    @property
    def remote_write_url(self):
        return f"{self.url}/api/v1/write"

    @property
    def otlp_url(self):
        """The base that OTLP/HTTP clients append ``/v1/metrics`` to."""
        return f"{self.url}/opentelemetry"

    def query(self, expression='{__name__=~"torchmem_.+"}', without=SCRAPED_BY, **parameters):
        get(f"{self.url}/internal/force_flush")
        return super().query(expression, without, nocache=1, **parameters)


@dataclass
class Rotel(Server):
    """A running OTLP agent; ``address`` is that of OTLP over HTTP."""

    grpc_address: str


@contextlib.contextmanager
def running(command, log, environment=None):
    """A process with its output in a file, ended by its pid whatever happens."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(server, is_ready):
    """Waits until a server is ready; one that died is told apart, with the end of its log."""

    def answers():
        if server.process.poll() is not None:
            end = "\n".join(server.log.read_text(errors="replace").splitlines()[-5:])
            raise RuntimeError(f"{server.process.args[0]} ended with {server.process.returncode}:\n{end}")
        try:
            return is_ready()
        except OSError:
            return False

    wait_until(answers, f"the start of {server.process.args[0]}")
    return server


def scrape_config(*targets, interval="1s", **more):
    """A configuration of Prometheus that scrapes addresses; further sections by their names."""
    scrape = {"job_name": "torchmem", "static_configs": [{"targets": list(targets)}]}
    return {"global": {"scrape_interval": interval, "scrape_timeout": interval}, "scrape_configs": [scrape], **more}


@contextlib.contextmanager
def prometheus(binary, folder, config, *arguments):
    """A real Prometheus.

    Args:
        binary: see ``find_program``.
        folder: for its configuration, storage and log.
        config: what is in its configuration file, see ``scrape_config``.
        arguments: further ones of its command line.
    """
    address, file = free_address(), folder / "prometheus.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    with running([binary, *flags, *arguments], folder / "prometheus.log") as process:
        server = Server(process, address, folder / "prometheus.log")
        yield wait_for(server, lambda: get(f"{server.url}/-/ready"))


@contextlib.contextmanager
def alertmanager(binary, folder, webhook_url):
    """A real Alertmanager that tells a webhook of each alert at once, and once; see ``prometheus``.

    Args:
        binary: see ``find_program``.
        folder: for its configuration, storage and log.
        webhook_url: where it posts what fires.
    """
    address, file = free_address(), folder / "alertmanager.yml"
    waits = {"group_wait": "1s", "group_interval": "1s", "repeat_interval": "24h"}
    config = {
        "route": {"receiver": "webhook", "group_by": ["alertname", "train_job"], **waits},
        "receivers": [{"name": "webhook", "webhook_configs": [{"url": webhook_url, "send_resolved": False}]}],
    }
    file.write_text(json.dumps(config))  # JSON is YAML
    flags = [
        f"--config.file={file}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # alone
    ]
    with running([*_with_its_own_files(binary), *flags], folder / "alertmanager.log") as process:
        server = Server(process, address, folder / "alertmanager.log")
        yield wait_for(server, lambda: get(f"{server.url}/-/ready"))


def _with_its_own_files(binary):
    """A command for Debian's Alertmanager, which opens its templates below /usr/share whether installed there or not.

    Unpacked elsewhere it gets a private view of the file system, its own package's /usr/share in the place of the
    machine's; the process stays the one that was started, and needs no rights.
    """
    share = Path(binary).resolve().parent.parent / "share"
    if share == Path("/usr/share") or not (share / "prometheus" / "alertmanager").is_dir():
        return [binary]
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(share), binary]


@contextlib.contextmanager
def victoria_metrics(binary, folder, *arguments):
    """A real VictoriaMetrics that names what OTLP brings as Prometheus does; see ``prometheus``."""
    address = free_address()
    flags = [
        f"-httpListenAddr={address}",
        f"-storageDataPath={folder / 'victoria-metrics'}",
        "-retentionPeriod=1d",
        "-opentelemetry.usePrometheusNaming",
        "-search.latencyOffset=0s",
    ]
    with running([binary, *flags, *arguments], folder / "victoria-metrics.log") as process:
        server = VictoriaMetrics(process, address, folder / "victoria-metrics.log")
        yield wait_for(server, lambda: get(f"{server.url}/health"))


@contextlib.contextmanager
def rotel(binary, folder, otlp_url, *arguments):
    """A real OTLP agent that takes OTLP over gRPC and HTTP and forwards it over HTTP; see ``prometheus``.

    Args:
        binary: see ``find_program``.
        folder: for its log and pid file.
        otlp_url: base of the address it forwards to, see ``VictoriaMetrics.otlp_url``.
        arguments: further ones of its command line.
    """
    address, grpc_address = free_address(), free_address()
    flags = [
        f"--pid-file={folder / 'rotel.pid'}",
        f"--otlp-grpc-endpoint={grpc_address}",
        f"--otlp-http-endpoint={address}",
        "--exporter=otlp",
        "--otlp-exporter-protocol=http",
        f"--otlp-exporter-endpoint={otlp_url}",
    ]
    with running([binary, "start", *flags, *arguments], folder / "rotel.log") as process:
        server = Rotel(process, address, folder / "rotel.log", grpc_address)
        yield wait_for(server, lambda: all(_listens(where) for where in (address, grpc_address)))


def _listens(address):
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=1):
        return True
