"""A forecast from end to end: made by the command line, given to running jobs, told by a sidecar, judged by Prometheus.

Two real jobs of two FSDP2 ranks are held against the same forecast: one trains with the batch that was forecast, the
other with a larger one. Shortened against a production's intervals: Prometheus scrapes and evaluates every second (15 s
or more), and the alert on a missed forecast holds for ``HOLD`` (15 min). No threshold is changed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

import backends
import sidecars
import torchmem
from generator.catalogue import alerts
from generator.recordings import recordings
from generator.render import alerts_yaml, rules_yaml
from generator.settings import DEFAULTS
from jobs import forecast_models
from jobs.ranks import run_alone
from torchmem.forecasting.outcome import load

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
WORLD_SIZE = 2
BATCHES = {"as-forecast": 8, "larger": 12}
"""By job; the first is what is forecast."""
NUM_RANKS = len(BATCHES) * WORLD_SIZE
NUM_STEPS = 3
MISSED = "TorchMemForecastMissed"
HOLD = "2s"
SECONDS = 120.0
"""For two jobs to start, and for one of them to be told of, on a busy machine."""
FIRING = f'ALERTS{{alertname="{MISSED}",alertstate="firing"}}'
OVER = "sum without (reftype) (torchmem_memory_step_peak_bytes) / torchmem_memory_forecast_bytes - 1"
"""What the ratio must be of."""


def write_forecast(path):
    """What a user runs before the job."""
    main = "import sys; from torchmem.cli import main; sys.exit(main())"
    job = ["jobs.held:build", "--set", f"batch={BATCHES['as-forecast']}"]
    command = [sys.executable, "-c", main, "forecast", *job, "--mesh", f"dp={WORLD_SIZE}", "--ranks", "0,last"]
    subprocess.run([*command, "--save", str(path)], check=True, timeout=SECONDS, cwd=TESTS, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def training(folder, forecast):
    """All ranks of both jobs, their records in ``folder/records``."""
    code = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('jobs.held', run_name='__main__')"
    with contextlib.ExitStack() as stack:
        for job, batch in BATCHES.items():
            for rank in range(WORLD_SIZE):
                told = [job, batch, forecast, folder / "records", folder, rank, WORLD_SIZE]
                command = [sys.executable, "-c", code, str(TESTS), *map(str, told)]
                stack.enter_context(backends.running(command, folder / f"{job}-{rank}.log"))
        yield


@contextlib.contextmanager
def judging(prometheus, folder, sidecar):
    """A Prometheus with the generated rules, of which one holds for a shorter time."""
    eager = replace(DEFAULTS, holds={**DEFAULTS.holds, MISSED: HOLD})
    files = folder / "rules.yml", folder / "alerts.yml"
    files[0].write_text(rules_yaml(recordings(eager)))
    files[1].write_text(alerts_yaml(alerts(eager), eager))
    config = backends.scrape_config(f"127.0.0.1:{sidecar.port}", rule_files=[str(file) for file in files])
    config["global"]["evaluation_interval"] = "1s"
    with backends.prometheus(prometheus, folder, config) as server:
        yield server


def told(sidecar, metric):
    """The values of a metric by job and rank, by the sidecar."""
    found = {}
    for (name, labels), value in sidecars.series(sidecar.ask().text).items():
        if name == metric:
            of = dict(labels)
            assert of.get("device", "cpu") == "cpu"
            found[of["train_job"], int(of["rank"])] = value
    return found


def wait_for_steps(sidecar, folder):
    """Until all ranks have made their optimizer's state, and a step with it, which is the one that is forecast."""

    def stepped():
        return [steps >= NUM_STEPS for steps in told(sidecar, "torchmem_steps_total").values()] == [True] * NUM_RANKS

    try:
        backends.wait_until(stepped, "the first steps", SECONDS, 1)
    except TimeoutError:
        logs = [f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(folder.glob("*.log"))]
        pytest.fail("\n".join(logs))


def test_a_job_keeps_to_its_forecast_and_one_with_a_larger_batch_is_told_of(prometheus, tmp_path):
    """A forecast would be lost between the command and the alert, be wrong, or its miss never be told."""
    forecast = tmp_path / "forecast.json"
    write_forecast(forecast)
    saved = load(forecast)
    (tmp_path / "records").mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(training(tmp_path, forecast))
        sidecar = stack.enter_context(sidecars.running(tmp_path / "records"))
        server = stack.enter_context(judging(prometheus, tmp_path, sidecar))
        wait_for_steps(sidecar, tmp_path)

        ranks = {(job, rank) for job in BATCHES for rank in range(WORLD_SIZE)}
        expected = {key: saved.peak_bytes_of(key[1], "cpu") for key in ranks}
        assert told(sidecar, "torchmem_memory_forecast_bytes") == expected
        ratios = told(sidecar, "torchmem_memory_forecast_drift_ratio")
        for rank in range(WORLD_SIZE):
            assert abs(ratios["as-forecast", rank]) < 0.01
            assert ratios["larger", rank] > 2 * DEFAULTS.max_forecast_ratio

        backends.wait_until(lambda: server.query(FIRING), "the alert", SECONDS, 0.5)
        assert [dict(labels)["train_job"] for _, labels in server.query(FIRING)] == ["larger"]
        over = {labels: value for (_, labels), value in server.query(OVER).items()}
        published = server.query("torchmem_memory_forecast_drift_ratio")
        assert over == pytest.approx({labels: value for (_, labels), value in published.items()})
        assert max(abs(value) for labels, value in over.items() if ("train_job", "as-forecast") in labels) < 0.01


def reason_on_a_mesh(_rank, _world_size, directory, forecast):
    """What a rank of two by two says of a forecast that was made for another mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer, _ = forecast_models.tensor_parallel(mesh)
    with (
        pytest.warns(RuntimeWarning, match="is of another run"),
        torchmem.install(model, optimizer, dir=directory, forecast=forecast) as monitor,
    ):
        return {labeler.name: labeler.reason for labeler in monitor.snapshot().labelers}["forecast"]


def test_a_forecast_for_another_mesh_is_refused(tmp_path):
    """A job would be held against shards of other sizes than its own."""
    forecast = tmp_path / "forecast.json"
    torchmem.forecast(forecast_models.tensor_parallel, world_size=4, mesh={"dp": 1, "tp": 4}).save(forecast)
    reason = run_alone(reason_on_a_mesh, 4, str(tmp_path), str(forecast))
    assert reason.endswith("its mesh has dp=1, this job's dp=2; forecast with --mesh dp=2,...")
