"""The hand-over to a larger store: a real Prometheus scrapes a sidecar and writes on to a real VictoriaMetrics."""

from __future__ import annotations

import contextlib
import math
import time

import pytest

import backends
from records import living, make_record
from sidecars import running, series
from torchmem.wire.record import encode

NUM_RANKS, NUM_MODULES = 4, 60
ARRIVAL_SECONDS = 60


def ranks(step):
    """Records of four ranks; every byte count is a function of the step."""
    return [
        make_record(i, NUM_MODULES, step=step, written_at=time.time(), unattributed_bytes=(1 << 50) + step + i)
        for i in range(NUM_RANKS)
    ]


def exposed(sidecar):
    """What stays the same from scrape to scrape, as a store has it: an empty label is none."""
    first, second = (series(sidecar.ask().text) for _ in range(2))
    moving = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert not any(dict(labels).get("rank") for _, labels in moving), "nothing of a rank moves but by its record"
    found = {key: value for key, value in second.items() if key not in moving and key[0].startswith("torchmem_")}
    return {(name, tuple(pair for pair in labels if pair[1])): value for (name, labels), value in found.items()}


def differing(found, wanted):
    """Series of which the store has another value: whole numbers are told to the last digit, times to 15 digits."""
    return {
        key: (found.get(key), value)
        for key, value in wanted.items()
        if found.get(key) != value
        and not (key in found and not float(value).is_integer() and math.isclose(found[key], value, rel_tol=1e-14))
    }


def arrived(store, wanted):
    """What the store has as soon as that is what is wanted, else what it has in the end."""
    found = {}

    def is_all_there():
        found.clear()
        found.update(store.query())
        return not differing(found, wanted)

    with contextlib.suppress(TimeoutError):  # what did not arrive is named by who asks
        backends.wait_until(is_all_there, "arrival", ARRIVAL_SECONDS, 0.5)
    return found


@pytest.mark.slow
def test_every_series_comes_back_from_victoria_metrics(prometheus, victoria_metrics, tmp_path):
    """A fleet's figures would be lost, or differ from what the ranks wrote, on their way to the store."""
    with (
        living(tmp_path / "records", *ranks(1)) as stores,
        running(tmp_path / "records") as sidecar,
        backends.victoria_metrics(victoria_metrics, tmp_path) as store,
    ):
        write = {"url": store.remote_write_url, "queue_config": {"batch_send_deadline": "1s"}}
        config = backends.scrape_config(f"127.0.0.1:{sidecar.port}", remote_write=[write])
        with backends.prometheus(prometheus, tmp_path, config) as server:
            for step in (1, 2):
                for rank, record in zip(stores, ranks(step), strict=True):
                    rank.write(encode(record))
                wanted = exposed(sidecar)
                found = arrived(store, wanted)
                assert differing(found, wanted) == {}
            assert server.value("sum(prometheus_remote_storage_samples_failed_total)") in (None, 0)
    assert {key for key in found if "rank" in dict(key[1])} == {key for key in wanted if "rank" in dict(key[1])}
