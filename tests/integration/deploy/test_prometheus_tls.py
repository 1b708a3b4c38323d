"""HTTPS and a token, from end to end: the sidecar as ``deploy/kubernetes/sidecar-tls`` sets it, scraped by a real
Prometheus as ``deploy/prometheus/files-tls.yml`` says."""

from __future__ import annotations

import json
import shutil
import ssl
import time

import pytest
import trustme
import yaml

import backends
import deploys
import sidecars
from records import living, make_record

pytestmark = pytest.mark.slow

SIDECAR = deploys.DEPLOY / "kubernetes" / "sidecar-tls"
TOKEN = "long-and-random"


@pytest.fixture
def secrets(tmp_path):
    """A certificate, its authority and a token, as the people of a cluster make them, beside our web configuration."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    shutil.copy(SIDECAR / "web-config.yml", tmp_path)
    return tmp_path


def arguments(folder):
    """Those of the sidecar but for where it listens and looks, its files in another folder."""
    template = yaml.safe_load((SIDECAR / "sidecar.yaml").read_text())["template"]
    given = template["spec"]["initContainers"][0]["args"]
    kept = [argument for argument in given if not argument.startswith(("--dir=", "--listen="))]
    return [argument.replace("/etc/torchmem/", f"{folder}/") for argument in kept]


def test_prometheus_scrapes_by_token_and_nobody_without(prometheus, secrets):
    """Prometheus would be locked out, or everybody let in."""
    folder = secrets / "prometheus"
    (folder / "targets").mkdir(parents=True)
    config = yaml.safe_load((deploys.DEPLOY / "prometheus" / "files-tls.yml").read_text())
    (scrape,) = config["scrape_configs"]
    config["global"]["scrape_interval"] = "1s"
    # The files that it names lie beside it; no rules are needed here.
    del config["rule_files"]
    for name in ("ca.crt", "token"):
        shutil.copy(secrets / name, folder)
    with (
        living(secrets / "records", make_record(written_at=time.time())),
        sidecars.running(secrets / "records", *arguments(secrets), listen="0.0.0.0:0") as sidecar,
    ):
        targets = [{"targets": [f"localhost:{sidecar.port}"]}]
        (folder / "targets" / "targets.json").write_text(json.dumps(targets))
        with backends.prometheus(prometheus, folder, config) as server:
            backends.wait_until(lambda: server.value("torchmem_rank_up") == 1, "the first scrape")
        context = ssl.create_default_context(cafile=secrets / "ca.crt")
        context.check_hostname = False  # the tests ask by address
        assert sidecar.ask("/metrics", tls=context).status == 401
        assert sidecar.ask("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, tls=context).status == 200
        assert sidecar.ask("/healthz", tls=context).status == 200
    assert scrape["scheme"] == "https"
