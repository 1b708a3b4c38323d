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
