"""The README says what is there: its settings, its commands, its code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch

from torchmem import config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_settings_table_is_the_settings():
    """A setting would be undocumented, or documented under another name."""
    rows = re.findall(r"^\| `(\w+)` \| `(TORCHMEM_\w+)` \|", README, flags=re.MULTILINE)
    names = [field.name for field in dataclasses.fields(config.Config)]
    assert rows == [(name, f"TORCHMEM_{name.upper()}") for name in names]


def test_the_three_lines_run(tmp_path, monkeypatch):
    """A user who copies the three lines would get an error."""
    monkeypatch.setenv("TORCHMEM_DIR", str(tmp_path))
    model = torch.nn.Linear(4, 4)
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(blocks("python")[0], names)
    assert names["monitor"].snapshot().clock.final
    assert len(list(tmp_path.glob("*/rank-0.record"))) == 1


def test_the_closer_look_runs(capsys):
    """A user who changes the import of torch's tracker would get an error."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    code = "import torchmem\n" + blocks("python")[1]
    exec(code, {"model": model, "optimizer": optimizer, "batch": torch.ones(2, 4)})
    assert "Gradient" in capsys.readouterr().out


def test_make_targets_exist():
    """The README would tell a user to run a target that is not there."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make (\w+)`", README)) | set(re.findall(r"^make (\w+)$", README, flags=re.MULTILINE))
    assert targets >= {"demo", "test", "tools"}
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_ci_runs_the_two_commands():
    """A command of the README would be broken unnoticed."""
    ci = (ROOT / ".ci" / "run").read_text()
    for command in blocks("console")[0].split("\n"):
        assert command in ci


def test_the_exporters_address_is_the_default():
    """The sidecar's command line would differ from the README's."""
    from torchmem_exporter.config import DEFAULT_LISTEN

    assert f"--listen {DEFAULT_LISTEN}" in README
