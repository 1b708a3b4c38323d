"""The recorded skew of a rank, which two heatmaps show, as promtool evaluates it."""

from __future__ import annotations

import json
import subprocess

from generator.catalogue import RULES
from timelines import GRAFANA

INFO = {"attempt": "a", "pid": "1", "host": "h", "engine": "native", "gpu_uuid": "", "dp": "", "pp": "0"}
PEAKS = {("0", "0"): 100, ("1", "0"): 100, ("2", "0"): 150, ("3", "1"): 400, ("4", "1"): 400}
"""Step peak by rank and coordinate of tensor parallelism."""


def series(name, value, **labels):
    """A constant series, as promtool takes it."""
    text = ",".join(f'{label}="{one}"' for label, one in labels.items())
    return {"series": f"{name}{{{text}}}", "values": f"{value}x5"}


def told_of(rank, tp, peak, instance):
    """What one sidecar tells of a rank: a half of its peak each for two reftypes."""
    of = {"train_job": "a", "rank": rank, "instance": instance}
    parts = [
        series("torchmem_memory_step_peak_bytes", peak / 2, **of, device="cuda:0", reftype=reftype)
        for reftype in ("activation", "gradient")
    ]
    return [*parts, series("torchmem_rank_info", 1, **of, **INFO, tp=tp), series("torchmem_rank_up", 1, **of)]


def test_skew_is_over_the_median_of_those_that_do_the_same_work(promtool, tmp_path):
    """A stage that is larger by nature would light up, or an uneven rank would not."""
    told = [one for (rank, tp), peak in PEAKS.items() for one in told_of(rank, tp, peak, "one")]
    told += told_of("2", "0", PEAKS["2", "0"], "two")  # it has moved, and two sidecars tell of it for a while
    name = "rank:torchmem_memory_skew_ratio:median"
    expected = {"0": 1, "1": 1, "2": 1.5, "3": 1, "4": 1}
    samples = [{"labels": f'{name}{{train_job="a",rank="{rank}"}}', "value": value} for rank, value in expected.items()]
    asked = [{"expr": name, "eval_time": "4m", "exp_samples": samples}]
    test = {"interval": "1m", "input_series": told, "promql_expr_test": asked}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(GRAFANA / RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
