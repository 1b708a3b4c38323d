"""``deploy/README.md``: what it names is there."""

from __future__ import annotations

import re
import subprocess

import yaml

import deploys
import manifests

README = (deploys.DEPLOY / "README.md").read_text()


def test_every_folder_has_its_row():
    """A deployment would be there and nobody know."""
    rows = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|", README, re.MULTILINE)
    folders = {path.name for path in deploys.DEPLOY.iterdir() if path.is_dir()}
    assert {name for name, _ in rows} == folders | {"scale.md"}
    assert all(name == target for name, target in rows)


def test_every_kustomization_has_its_row():
    """An example would be there and nobody know, or be named and not be there."""
    kubernetes = deploys.DEPLOY / "kubernetes"
    named = set(re.findall(r"^\| `([\w/-]+)` \|", README, re.MULTILINE))
    files = kubernetes.rglob("kustomization.yaml")
    assert named == {
        file.parent.relative_to(kubernetes).as_posix() for file in files if "kind: Kustomization" in file.read_text()
    }


def test_the_paths_it_names_are_there():
    """Who follows the page would stop at an error."""
    named = re.findall(r"\bdeploy/[\w/.@-]*\w", README) + [
        f"deploy/{path}" for path in re.findall(r"\]\((\w[^)]*)\)", README)
    ]
    assert len(named) > 10
    assert [path for path in named if not (deploys.ROOT / path).exists() and "torchmem/" not in path] == []
    deploys.passed("what it names", "README.md")


def test_the_kustomization_it_shows_works(kubectl, tmp_path):
    """Who copies it would get an error, or a job without the sidecar."""
    (shown,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "torchmem").symlink_to(deploys.ROOT)
    (tmp_path / "kustomization.yaml").write_text(shown)
    job = (deploys.DEPLOY / "kubernetes" / "overlays" / "job" / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(job)
    done = subprocess.run([kubectl, "kustomize", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (template,) = [pod for item in manifests.objects(done.stdout) for pod in manifests.pod_templates(item)]
    (image,) = yaml.safe_load(shown)["images"]
    (sidecar,) = template["spec"]["initContainers"]
    assert sidecar["image"] == f"{image['newName']}:{image['newTag']}"


def test_the_command_it_shows_gives_runbooks_an_address(kubectl):
    """Who copies it would have alerts without runbooks, or apply what kustomize did not make."""
    (shown,) = re.findall(r"^kubectl kustomize (\S+) \|\n\s+(sed '[^']*') \| kubectl apply", README, re.MULTILINE)
    done = subprocess.run([kubectl, "kustomize", deploys.ROOT / shown[0]], capture_output=True, text=True, check=True)
    changed = subprocess.run(["sh", "-c", shown[1]], input=done.stdout, capture_output=True, text=True, check=True)
    before, after = manifests.objects(done.stdout), manifests.objects(changed.stdout)
    assert [item["kind"] for item in before] == [item["kind"] for item in after]
    (rule,) = [item for item in after if item["kind"] == "PrometheusRule"]
    alerts = [one for group in rule["spec"]["groups"] for one in group["rules"] if "alert" in one]
    assert len(alerts) > 10
    for alert in alerts:
        path = f"grafana/runbooks/{alert['alert']}.md"
        assert alert["annotations"]["runbook_url"] == f"https://git.example/torchmem/{path}"
