"""The sidecar's life as a process: protected by its flags, reloaded, ended once and ended twice."""

from __future__ import annotations

import base64
import contextlib
import json
import resource
import signal
import socket
import subprocess
import time

import bcrypt
import pytest
import trustme

from hosting import client_tls
from records import living, make_record
from sidecars import DEADLINE_SECONDS, Process, command, running, states
from torchmem.errors import ConfigError
from torchmem_exporter.serving.security import Guard, Sources

STUCK = """
import sys, time
from torchmem_exporter import cli
from torchmem_exporter.serving import routes

def stuck(*_):
    print("stuck", file=sys.stderr, flush=True)
    time.sleep(60)

routes.metrics = stuck
sys.exit(cli.main(sys.argv[1:]))
"""
PATIENT = f"""
import functools
from torchmem_exporter.serving import server
server.Limits = functools.partial(server.Limits, drain_seconds=60.0)
{STUCK}"""
"""Waits for what is stuck for longer than a busy machine takes to send it another signal."""


@pytest.fixture
def protection(tmp_path):
    """Flags for TLS, a user and a token; a client's TLS context; and headers of those who may ask."""
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    (tmp_path / "both.pem").write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    password_hash = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    tls = "tls_server_config: {cert_file: both.pem, key_file: both.pem}"
    (tmp_path / "web.yml").write_text(f"{tls}\nbasic_auth_users: {{alice: {password_hash}}}\n")
    (tmp_path / "tokens").write_text("a-token\n")
    flags = ["--web-config", str(tmp_path / "web.yml"), "--bearer-token-file", str(tmp_path / "tokens")]
    basic = "Basic " + base64.b64encode(b"alice:secret").decode()
    return flags, client_tls(authority), ({"Authorization": basic}, {"Authorization": "Bearer a-token"})


def test_a_protected_sidecar(tmp_path, protection):
    """The flags would not protect what they say, or a probe without credentials would end the pod."""
    flags, tls, credentials = protection
    with living(tmp_path / "records", make_record(0)), running(tmp_path / "records", *flags) as sidecar:
        assert "serving https://127.0.0.1:" in sidecar.first_line
        refused = {path: sidecar.ask(path, tls=tls).status for path in ("/", "/metrics", "/readyz", "/x", "/healthz")}
        assert refused == {"/": 401, "/metrics": 401, "/readyz": 401, "/x": 401, "/healthz": 200}
        for headers in credentials:
            assert states(sidecar.ask(headers=headers, tls=tls).text).keys() == {"0"}
            assert sidecar.ask("/readyz", headers=headers, tls=tls).status == 200


CERTIFICATE = "cert_file: both.pem, key_file: both.pem"
MUTUAL = "client_auth_type: VerifyClientCertIfGiven, client_ca_file: both.pem"


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        (f"tls_server_config: {{{CERTIFICATE}}}", True),
        (f"tls_server_config: {{{CERTIFICATE}, min_version: TLS13}}", True),
        (f"tls_server_config: {{{CERTIFICATE}, cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA]}}", True),
        (f"tls_server_config: {{{CERTIFICATE}, curve_preferences: [CurveP521]}}", True),
        (f"tls_server_config: {{{CERTIFICATE}, {MUTUAL}}}", True),
        ("http_server_config: {headers: {X-Frame-Options: sameorigin}}", True),
        ("{}", True),
        (f"tls_server_config: {{{CERTIFICATE}, unknown: 1}}", False),
        ("tls_server_config: {cert_file: both.pem}", False),
        ("tls_server_config: {cert_file: nowhere, key_file: both.pem}", False),
        (f"tls_server_config: {{{CERTIFICATE}, cipher_suites: [TLS_INVENTED]}}", False),
        (f"tls_server_config: {{{CERTIFICATE}, curve_preferences: [CurveP1]}}", False),
        (f"tls_server_config: {{{CERTIFICATE}, min_version: TLS111}}", False),
        (f"tls_server_config: {{{CERTIFICATE}, client_auth_type: Some}}", False),
        (f"tls_server_config: {{{CERTIFICATE}, client_ca_file: both.pem}}", False),
        ("http_server_config: {headers: {X-Frame-Options: allow}}", False),
        ("http_server_config: {headers: {Server: me}}", False),
        ("basic_auth_users: {alice: plain}", False),
        ("basic_auth_users: [alice]", False),
    ],
)
def test_exporter_toolkit_and_this_server_agree(protection, promtool, tmp_path, text, is_good):
    """A file that an operator has checked with Prometheus' own tool would be refused, or mean something else."""
    path = tmp_path / "checked.yml"
    path.write_text(text)
    done = subprocess.run([promtool, "check", "web-config", str(path)], capture_output=True, timeout=30, check=False)
    try:
        Guard(Sources(path)).close()
    except ConfigError:
        is_taken = False
    else:
        is_taken = True
    assert (done.returncode == 0, is_taken) == (is_good, is_good), done.stderr


def test_the_log_in_json(tmp_path):
    """A log collector would have to guess where an event begins."""
    flags = ["--log-format", "json", "--log-level", "debug"]
    with running(tmp_path, *flags) as sidecar:
        first = json.loads(sidecar.first_line)
        assert sidecar.ask("/nowhere").status == 404
        assert sidecar.end()[0] == 0
        events = [first, *map(json.loads, sidecar.errors.read().splitlines())]
    assert first["msg"].startswith("serving http://")
    assert [event["msg"] for event in events if event["level"] == "info"][1:] == ["ending"]


def test_a_second_signal_ends_at_once(tmp_path):
    """Whoever cannot wait would have to look up how to kill it."""
    with (
        running(tmp_path, program=PATIENT) as sidecar,
        socket.create_connection(("127.0.0.1", sidecar.port), DEADLINE_SECONDS) as client,
    ):
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sidecar.errors.readline() == "stuck\n"
        sidecar.process.send_signal(signal.SIGTERM)
        assert "msg=ending" in sidecar.errors.readline()
        assert sidecar.end(signal.SIGTERM)[0] == -signal.SIGTERM


def test_a_stuck_worker_does_not_hold_up_the_end(tmp_path):
    """A disk that does not answer would keep a pod from ending until it is killed."""
    with (
        running(tmp_path, program=STUCK) as sidecar,
        socket.create_connection(("127.0.0.1", sidecar.port), DEADLINE_SECONDS) as client,
    ):
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 200"
        assert sidecar.errors.readline() == "stuck\n"
        status, seconds = sidecar.end()
    assert status == 0
    assert seconds < 5


def test_a_low_limit_of_descriptors_leaves_some_for_the_records(tmp_path):
    """On a host with a low limit, idle clients would keep the sidecar from reading its records."""
    arguments = ["prlimit", "--nofile=40:40", *command("--dir", str(tmp_path), "--listen", "127.0.0.1:0")]
    with (
        living(tmp_path, *(make_record(i, written_at=time.time()) for i in range(8))),
        subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as clients,
    ):
        try:
            port = int(process.stderr.readline().partition("http://127.0.0.1:")[2].partition("/")[0])
            for _ in range(60):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE_SECONDS))
            assert states(Process(process, None, port, "").ask().text) == {str(i): "running" for i in range(8)}
        finally:
            process.kill()


def test_without_descriptors_idle_clients_make_room(tmp_path):
    """On a host with a low limit, idle clients would keep every scraper out, or the accepting would spin."""
    with running(tmp_path) as sidecar, contextlib.ExitStack() as clients:
        assert sidecar.ask().status == 200
        resource.prlimit(sidecar.process.pid, resource.RLIMIT_NOFILE, (40, 40))
        for _ in range(60):
            clients.enter_context(socket.create_connection(("127.0.0.1", sidecar.port), DEADLINE_SECONDS))
        assert sidecar.ask().status == 200
        assert sidecar.end()[0] == 0
        said = sidecar.errors.read()
    assert "Too many open files" in said
    assert said.count("\n") < 100
