"""Web-config files: what exporter-toolkit takes and this server can do is taken, all else is refused in one line."""

from __future__ import annotations

import pytest

from torchmem.errors import ConfigError
from torchmem_exporter.serving import tls
from torchmem_exporter.serving.webconfig import MAX_FILE_BYTES, Material, read_web_config

HASH = "$2y$04$qC3cUwFTpxUaiQTzVcZY5ujeGYYLC1fYkLl0bzaCpQaUS34W0PVF6"
TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key"


def read(folder, text):
    path = folder / "web.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_web_config(path)


def test_everything_that_can_be_set(tmp_path):
    """A setting would be read as another, or be dropped in silence."""
    config = read(
        tmp_path,
        f"""
        tls_server_config:
          cert_file: server.crt
          key_file: /keys/server.key
          client_auth_type: RequireAndVerifyClientCert
          client_ca: inline
          client_allowed_sans: [scraper.example, 10.0.0.7]
          cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
          prefer_server_cipher_suites: false
          curve_preferences: [CurveP384]
          min_version: TLS12
          max_version: TLS13
        http_server_config:
          http2: false
          headers:
            Content-Security-Policy: default-src 'self'
            X-Frame-Options: deny
            X-Content-Type-Options: nosniff
            X-XSS-Protection: ""
            Strict-Transport-Security: max-age=31536000
        basic_auth_users:
          alice: {HASH}
          "bob": {HASH}
        """,
    )
    assert config.tls.cert == Material(tmp_path / "server.crt", "")
    assert str(config.tls.key.file) == "/keys/server.key"
    assert config.tls.client_ca == Material(None, "inline")
    assert config.tls.requires_client_cert
    assert config.tls.client_allowed_sans == ("scraper.example", "10.0.0.7")
    assert (config.tls.curve, config.tls.prefer_server_cipher_suites) == ("CurveP384", False)
    assert (config.tls.min_version, config.tls.max_version) == ("TLS12", "TLS13")
    assert dict(config.headers).keys() == {
        "Content-Security-Policy",
        "X-Frame-Options",
        "X-Content-Type-Options",
        "Strict-Transport-Security",
    }
    assert config.users == {"alice": HASH.encode(), "bob": HASH.encode()}


@pytest.mark.parametrize("text", ["{}", "tls_server_config:\n", "basic_auth_users: {}\n", "http_server_config:\n"])
def test_sections_may_be_missing_or_empty(tmp_path, text):
    """A file that only sets one thing would be refused."""
    config = read(tmp_path, text)
    assert (config.tls, config.headers, dict(config.users)) == (None, (), {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a list\n", "Expected `object`"),
        ("a: b: c\n", "no YAML in line 1"),
        ("a: [1\n", "no YAML in line"),
        (b"\xff\xfe\x00", "no YAML"),
        (b"a: \x07", "no YAML"),
        ("x: !!python/object/apply:os.system [id]\n", "no YAML"),
        ("rate_limit: {interval: 1s}\n", "rate_limit"),
        (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}\n", "'a' is there twice"),
        ("? [a]\n: b\n", "no name"),
        ("tls_server_config: {certfile: a}\n", "certfile"),
        ("tls_server_config: {key_file: a}\n", "neither cert nor cert_file"),
        ("tls_server_config: {cert_file: a}\n", "neither key nor key_file"),
        ("tls_server_config: {client_auth_type: NoClientCert}\n", "neither cert nor cert_file"),
        (f"{TLS}, cert: a}}\n", "both cert and cert_file"),
        (f"{TLS}, client_ca: a, client_ca_file: b, client_auth_type: VerifyClientCertIfGiven}}\n", "both client_ca"),
        (f"{TLS}, client_ca_file: ca}}\n", "client_auth_type"),
        (f"{TLS}, client_auth_type: RequireAndVerifyClientCert}}\n", "needs client_ca_file"),
        (f"{TLS}, client_auth_type: VerifyClientCertIfGiven}}\n", "needs client_ca_file"),
        (f"{TLS}, client_auth_type: RequestClientCert, client_ca_file: ca}}\n", "use RequireAndVerifyClientCert"),
        (f"{TLS}, client_auth_type: RequireAnyClientCert}}\n", "use RequireAndVerifyClientCert"),
        (f"{TLS}, client_auth_type: requireandverifyclientcert}}\n", "RequireAndVerifyClientCert"),
        (f"{TLS}, client_allowed_sans: [a]}}\n", "RequireAndVerifyClientCert"),
        (
            f"{TLS}, client_allowed_sans: [], client_ca: a, client_auth_type: RequireAndVerifyClientCert}}\n",
            "no client",
        ),
        (f"{TLS}, min_version: TLS10}}\n", "below 1.2"),
        (f"{TLS}, min_version: TLS11, max_version: TLS11}}\n", "below 1.2"),
        (f"{TLS}, min_version: SSL30}}\n", "SSL30"),
        (f"{TLS}, min_version: TLS13, max_version: TLS12}}\n", "above max_version"),
        (f"{TLS}, curve_preferences: [X25519, CurveP256]}}\n", "one curve only"),
        (f"{TLS}, prefer_server_cipher_suites: 1}}\n", "bool"),
        ("http_server_config: {http2: true}\n", "HTTP/1.1 only"),
        ("http_server_config: {headers: {Set-Cookie: a}}\n", "Set-Cookie"),
        ("http_server_config: {headers: {X-Frame-Options: allow}}\n", "deny or sameorigin"),
        ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nB: c"}}\n', "plain ASCII"),
        ("basic_auth_users: {alice: secret}\n", "no bcrypt hash"),
        ("basic_auth_users: {alice: null}\n", "str"),
        (f"basic_auth_users: {{1: {HASH}}}\n", "str"),
        (f'basic_auth_users: {{"a:b": {HASH}}}\n', "colon"),
        (f"basic_auth_users: {{alice: {HASH.replace('$04$', '$31$')}}}\n", "cost"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, text, said):
    """A mistake in the file would leave the sidecar open, or end in a traceback."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert said in message
    assert str(tmp_path / "web.yml") in message
    assert "\n" not in message


def test_missing_file_is_one_line(tmp_path):
    """A mistyped path would end in a traceback."""
    with pytest.raises(ConfigError, match=r"No such file.*--web-config"):
        read_web_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]", "unknown or unsafe"),
        ("cipher_suites: [TLS_AES_128_GCM_SHA256], max_version: TLS12", "none for TLS 1.2"),
        ("curve_preferences: [CurveP192]", "CurveP256"),
    ],
)
def test_what_ssl_cannot_do_is_refused_in_one_line(tmp_path, setting, said):
    """A suite that the operator relies on would be left out in silence."""
    config = read(tmp_path, f"{TLS}, {setting}}}\n")
    with pytest.raises(ConfigError, match=said):
        tls.make_context(config.tls)
