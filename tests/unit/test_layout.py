"""What pyproject.toml promises is there: public names, commands, and the files that an installed package needs."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = {"torchmem": ROOT / "instrument" / "torchmem", "torchmem_exporter": ROOT / "exporter" / "torchmem_exporter"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def data_files(package):
    """The files of a package that are no Python sources."""
    files = [path for path in PACKAGES[package].rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path for path in files if path.suffix != ".py"}


@pytest.mark.parametrize("name", ["torchmem", "torchmem-exporter"])
def test_console_script_resolves(name):
    """An installed command would end in an ImportError."""
    scripts = importlib.metadata.distribution("torchmem").entry_points.select(group="console_scripts", name=name)
    assert [callable(script.load()) for script in scripts] == [True]


def test_public_names_resolve():
    """A name in ``torchmem.__all__`` would raise AttributeError when used."""
    torchmem = importlib.import_module("torchmem")
    assert [name for name in torchmem.__all__ if not hasattr(torchmem, name)] == []
    assert 0 < len(torchmem.__all__) <= 10


@pytest.mark.parametrize("package", PACKAGES)
def test_data_files_are_declared(package):
    """A native source or a type marker would be missing from the wheel."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"][package]
    declared = {path for pattern in patterns for path in PACKAGES[package].glob(pattern)}
    assert data_files(package) - declared == set()


def test_every_folder_of_sources_is_a_package():
    """A folder without ``__init__.py`` would work in a checkout and be missing from the wheel."""
    folders = {path.parent for root in PACKAGES.values() for path in root.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_wheel_holds_every_file(tmp_path):
    """``pip install torchmem`` would bring less than a checkout has."""
    source = tmp_path / "source"
    for name in ("instrument", "exporter"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("torchmem-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path: root.parent for root in PACKAGES.values() for path in root.rglob("*.py")}
    sources |= {path: root.parent for package, root in PACKAGES.items() for path in data_files(package)}
    assert held == {str(path.relative_to(parent)) for path, parent in sources.items()}
