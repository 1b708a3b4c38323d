"""TLS with real certificates and clients: who gets in, which versions, what a reload changes and whom it disturbs."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading

import bcrypt
import pytest
import trustme

from hosting import client_tls, hosted, read_all, wait_for
from sidecars import DEADLINE_SECONDS
from torchmem.errors import ConfigError
from torchmem_exporter.serving.security import Guard, Sources

SAN = "scraper.example"


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def certificate(authority):
    return authority.issue_cert("127.0.0.1")


@pytest.fixture(scope="module")
def client_certificate(authority):
    return authority.issue_cert(SAN, "2001:db8::7")


@pytest.fixture
def folder(tmp_path, authority, certificate):
    """A folder with a server's certificate and key and the authority's certificate."""
    put(tmp_path, certificate)
    (tmp_path / "ca.crt").write_bytes(authority.cert_pem.bytes())
    return tmp_path


def put(folder, certificate):
    """Replaces the server's certificate and key, one after the other."""
    for name, pem in (("server.crt", certificate.cert_chain_pems[0]), ("server.key", certificate.private_key_pem)):
        (folder / "new").write_bytes(pem.bytes())
        (folder / "new").rename(folder / name)


def sources(folder, *settings, rest="", **others):
    """Where protection comes from: a web-config file with TLS."""
    path = folder / "new-web.yml"
    listed = ", ".join(("cert_file: server.crt", "key_file: server.key", *settings))
    path.write_text(f"tls_server_config: {{{listed}}}\n{rest}\n")
    path.rename(folder / "web.yml")
    return Sources(folder / "web.yml", **others)


MUTUAL = ("client_auth_type: RequireAndVerifyClientCert", "client_ca_file: ca.crt")


def is_served(server, tls):
    """Whether a client gets an answer; with TLS 1.3 a refusal may come only when it asks."""
    try:
        return server.ask(tls=tls).status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_requests_over_tls(folder, authority):
    """Figures and passwords would cross the network in plain text, or not at all."""
    with hosted(sources=sources(folder)) as server:
        assert server.server.url.startswith("https://")
        assert server.ask(tls=client_tls(authority)).body == b"ok\n"
        with server.connect(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") as plain:
            assert not read_all(plain).startswith(b"HTTP/1.1 200")
        wait_for(lambda: server.counts.num_handshakes_failed == 1)
        with pytest.raises(ssl.SSLCertVerificationError):
            server.ask(tls=ssl.create_default_context())


def test_inline_certificate_and_key(tmp_path, authority, certificate):
    """A deployment that keeps all in one secret could not be configured, or would leave its key on a disk."""
    path = tmp_path / "web.yml"
    pems = {"cert": certificate.cert_chain_pems[0], "key": certificate.private_key_pem}
    lines = [
        f"  {name}: |\n" + "".join(f"    {line}\n" for line in pem.bytes().decode().splitlines())
        for name, pem in pems.items()
    ]
    path.write_text("tls_server_config:\n" + "".join(lines))
    with hosted(sources=Sources(path)) as server:
        assert is_served(server, client_tls(authority))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_tls_is_refused(folder, authority, version):
    """Traffic could be read by who breaks an old protocol."""
    tls = client_tls(authority)
    tls.set_ciphers("ALL:@SECLEVEL=0")
    tls.minimum_version = tls.maximum_version = version
    with hosted(sources=sources(folder)) as server:
        assert not is_served(server, tls)
        wait_for(lambda: server.counts.num_handshakes_failed == 1)


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        ((), {"TLSv1.2", "TLSv1.3"}),
        (("min_version: TLS13",), {"TLSv1.3"}),
        (("max_version: TLS12",), {"TLSv1.2"}),
        (("cipher_suites: [TLS_AES_128_GCM_SHA256]",), {"TLSv1.3"}),
        (("curve_preferences: [CurveP384]",), {"TLSv1.2", "TLSv1.3"}),
        (("curve_preferences: [X25519]",), {"TLSv1.2", "TLSv1.3"}),
    ],
)
def test_versions_as_configured(folder, authority, settings, versions):
    """What a security policy forbids would be served, or what clients need refused."""
    served = set()
    with hosted(sources=sources(folder, *settings)) as server:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            tls = client_tls(authority)
            tls.minimum_version = tls.maximum_version = version
            with (
                contextlib.suppress(ssl.SSLError),
                server.connect() as plain,
                tls.wrap_socket(plain, server_hostname="127.0.0.1") as client,
            ):
                served.add(client.version())
    assert served == versions


def test_cipher_suites_as_configured(folder, authority):
    """A suite that a policy forbids would be used."""
    tls = client_tls(authority)
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    wanted = "[TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]"
    with hosted(sources=sources(folder, f"cipher_suites: {wanted}")) as server:
        with tls.wrap_socket(server.connect(), server_hostname="127.0.0.1") as client:
            assert client.cipher()[0].endswith("AES256-GCM-SHA384")
        tls.set_ciphers("ECDHE+AES128")
        assert not is_served(server, tls)


def test_client_certificates(folder, authority, client_certificate):
    """A client without a certificate of the authority would be let in, or one with it kept out."""
    stranger = trustme.CA().issue_cert(SAN)
    with hosted(sources=sources(folder, *MUTUAL)) as server:
        assert is_served(server, client_tls(authority, client_certificate))
        assert not is_served(server, client_tls(authority))
        assert not is_served(server, client_tls(authority, stranger))
        wait_for(lambda: server.counts.num_handshakes_failed == 2)


def test_client_certificates_if_given(folder, authority, client_certificate):
    """Those without a certificate could not use a password, or a wrong certificate would do."""
    stranger = trustme.CA().issue_cert(SAN)
    settings = "client_auth_type: VerifyClientCertIfGiven", "client_ca_file: ca.crt"
    with hosted(sources=sources(folder, *settings)) as server:
        certificates = (client_certificate, None, stranger)
        assert [is_served(server, client_tls(authority, one)) for one in certificates] == [True, True, False]


@pytest.mark.parametrize(
    ("allowed", "is_let_in"), [(SAN, True), ("2001:db8::7", True), ("other.example", False), ("SCRAPER.example", False)]
)
def test_only_allowed_names_get_in(folder, authority, client_certificate, allowed, is_let_in):
    """Any certificate of the authority would do, also one made for something else."""
    settings = (*MUTUAL, f'client_allowed_sans: ["{allowed}"]')
    with hosted(sources=sources(folder, *settings)) as server:
        assert is_served(server, client_tls(authority, client_certificate)) == is_let_in


def test_passwords_and_headers_over_tls(folder, authority):
    """An answer would miss what the operator wants on each, or a refusal not say how to authenticate."""
    users = f"basic_auth_users: {{alice: {bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}}}"
    headers = "http_server_config: {headers: {Strict-Transport-Security: max-age=1, X-Content-Type-Options: nosniff}}"
    tls = client_tls(authority)
    right = {"Authorization": "Basic " + base64.b64encode(b"alice:secret").decode()}
    with hosted(sources=sources(folder, rest=f"{users}\n{headers}", exposed_host="10.0.0.1")) as server:
        refused, let_in = server.ask("/metrics", tls=tls), server.ask("/metrics", headers=right, tls=tls)
    assert (refused.status, let_in.status) == (401, 200)
    assert refused.headers["WWW-Authenticate"].startswith("Basic ")
    for reply in (refused, let_in):
        assert reply.headers["Strict-Transport-Security"] == "max-age=1"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("settings", "others", "missing"),
    [((), {}, "no authentication"), (MUTUAL, {}, None), ((), {"bearer_token_file": "tokens"}, None)],
)
def test_an_exposed_address_needs_authentication_too(folder, settings, others, missing):
    """Anybody on the network could read which jobs run and how."""
    (folder / "tokens").write_text("a-token\n")
    others = {name: folder / value for name, value in others.items()}
    wanted = pytest.raises(ConfigError, match=missing) if missing else contextlib.nullcontext()
    with wanted:
        Guard(sources(folder, *settings, exposed_host="10.0.0.1", **others)).close()


def damaged(folder, name, content):
    """A file replaced by another, or taken away."""
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", ["server.crt", "server.key", "ca.crt"])
@pytest.mark.parametrize(
    "content", [None, b"", b"no certificate\n", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_bad_files_are_refused_in_one_line(folder, name, content):
    """A wrong file would end in a traceback, or in a server that nobody can reach."""
    wanted = sources(folder, *MUTUAL)
    damaged(folder, name, content)
    with pytest.raises(ConfigError) as error:
        Guard(wanted)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_of_another_certificate_or_under_a_password_is_refused(folder, authority):
    """The sidecar would ask for a password on a terminal that it does not have."""
    wanted = sources(folder)
    damaged(folder, "server.key", authority.issue_cert("127.0.0.1").private_key_pem.bytes())
    with pytest.raises(ConfigError, match="server.key"):
        Guard(wanted)
    head = b"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,"
    damaged(folder, "server.key", head + b"0" * 32 + b"\n\nAAAA\n-----END RSA PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match="server.key"):
        Guard(wanted)


def served_certificate(server):
    """What a new client is shown."""
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=DEADLINE_SECONDS)


def test_reload_under_load_fails_no_request(folder, authority):
    """Renewing a certificate would cost scrapes, or need a restart."""
    failures, num_served, is_over = [], [0], threading.Event()

    def load():
        while not is_over.is_set():
            try:
                server.ask(tls=client_tls(authority))
                num_served[0] += 1
            except (OSError, http.client.HTTPException) as error:
                failures.append(error)

    with hosted(sources=sources(folder), handshake_seconds=60, header_seconds=60) as server:
        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            for _ in range(5):
                before = served_certificate(server)
                num_before = num_served[0]
                renewed = authority.issue_cert("127.0.0.1")
                put(folder, renewed)
                wait_for(lambda before=before: served_certificate(server) != before)
                assert served_certificate(server).split() == renewed.cert_chain_pems[0].bytes().decode().split()
                damaged(folder, "server.crt", b"broken")
                wait_for(lambda number=num_before: num_served[0] >= number + 8)
                put(folder, renewed)
        finally:
            is_over.set()
            for client in clients:
                client.join(DEADLINE_SECONDS)
    assert failures == []
    assert num_served[0] > 40


def test_a_reload_changes_settings_but_never_drops_protection(folder, authority, client_certificate):
    """A client authority that was compromised could not be replaced, or a half-written file open the door."""
    sure, anonymous = client_tls(authority, client_certificate), client_tls(authority)
    with hosted(sources=sources(folder, *MUTUAL)) as server:
        for settings in ((), ("client_auth_type: VerifyClientCertIfGiven", "client_ca_file: ca.crt")):
            sources(folder, *settings)
            assert [is_served(server, tls) for tls in (sure, anonymous)] == [True, False]
        (folder / "web.yml").write_text("{}")
        assert [is_served(server, tls) for tls in (sure, anonymous)] == [True, False]
        assert server.guard.num_reload_failures == 3
        sources(folder, *MUTUAL, "client_allowed_sans: [other.example]")
        assert not is_served(server, sure)
        sources(folder, *MUTUAL)
        assert not is_served(server, sure)
        assert server.guard.num_reload_failures == 4
        sources(folder, *MUTUAL, f"client_allowed_sans: [{SAN}]")
        assert is_served(server, sure)
        (folder / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
        assert not is_served(server, sure)


def test_stuck_handshakes_hold_up_nobody(folder, authority):
    """One client that does not finish its handshake would keep all others from theirs."""
    limit = 2 * DEADLINE_SECONDS
    with hosted(sources=sources(folder), handshake_seconds=limit) as server, contextlib.ExitStack() as clients:
        for _ in range(20):
            clients.enter_context(server.connect(b"\x16\x03\x01"))
        assert is_served(server, client_tls(authority))
        assert (server.counts.num_handshakes_failed, server.counts.num_evicted) == (0, 0)


def test_a_stuck_handshake_is_given_up(folder):
    """Clients that do not finish their handshakes would pile up until nobody gets in."""
    with hosted(sources=sources(folder), handshake_seconds=0.2) as server, contextlib.ExitStack() as clients:
        stuck = [clients.enter_context(server.connect(b"\x16\x03\x01")) for _ in range(20)]
        assert [read_all(client) for client in stuck] == [b""] * 20
        wait_for(lambda: server.counts.num_handshakes_failed == 20)


def test_stuck_handshakes_make_room(folder, authority):
    """As many such clients as there may be connections would keep a scraper out."""
    limits = {"num_connections": 4, "handshake_seconds": 60}
    with hosted(sources=sources(folder), **limits) as server, contextlib.ExitStack() as clients:
        stuck = [clients.enter_context(server.connect(b"\x16\x03\x01")) for _ in range(8)]
        assert is_served(server, client_tls(authority))
        stuck[0].shutdown(socket.SHUT_WR)
        assert read_all(stuck[0]) == b""
        assert server.counts.num_evicted >= 4
