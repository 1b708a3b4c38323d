"""A real Prometheus that scrapes a protected sidecar, in each way that its configuration has."""

from __future__ import annotations

import bcrypt
import pytest
import trustme

import backends
from records import living, make_record
from sidecars import running

PASSWORD_HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(10)).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [{"basic_auth": {"username": "alice", "password": "secret"}}, {"authorization": {"credentials": "a-token"}}]
)
def test_prometheus_scrapes_over_mutual_tls(tmp_path, prometheus, way):
    """The protection would be of a kind that Prometheus cannot meet."""
    authority = trustme.CA()
    for name in ("127.0.0.1", "scraper"):
        (tmp_path / f"{name}.pem").write_bytes(authority.issue_cert(name).private_key_and_cert_chain_pem.bytes())
    (tmp_path / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (tmp_path / "tokens").write_text("another-token\na-token\n")
    (tmp_path / "web.yml").write_text(
        "tls_server_config: {cert_file: 127.0.0.1.pem, key_file: 127.0.0.1.pem, client_ca_file: ca.pem,"
        f" client_auth_type: RequireAndVerifyClientCert, client_allowed_sans: [scraper]}}\n"
        f"basic_auth_users: {{alice: {PASSWORD_HASH}}}\n"
    )
    flags = ["--web-config", str(tmp_path / "web.yml"), "--bearer-token-file", str(tmp_path / "tokens")]
    with living(tmp_path / "records", make_record(0)), running(tmp_path / "records", *flags) as sidecar:
        config = backends.scrape_config(f"127.0.0.1:{sidecar.port}")
        scraper = str(tmp_path / "scraper.pem")
        tls = {"ca_file": str(tmp_path / "ca.pem"), "cert_file": scraper, "key_file": scraper}
        config["scrape_configs"][0].update(scheme="https", tls_config=tls, **way)
        with backends.prometheus(prometheus, tmp_path, config) as server:
            assert backends.wait_until(server.query, "a scrape", seconds=60)
