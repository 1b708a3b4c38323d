"""The names of the metrics, which dashboards and alerts are written against."""

from __future__ import annotations

import pytest

from torchmem_exporter import catalog
from torchmem_exporter.catalog import Kind, Metric

NAMES = """
torchmem_module_memory_usage_bytes train_job,rank,device,module,reftype
torchmem_module_memory_step_peak_bytes train_job,rank,device,module,reftype
torchmem_module_memory_active_peak_bytes train_job,rank,device,module,reftype
torchmem_module_memory_excess_bytes train_job,rank,device,module,reftype
torchmem_memory_usage_bytes train_job,rank,device,reftype
torchmem_memory_step_peak_bytes train_job,rank,device,reftype
torchmem_memory_peak_bytes train_job,rank,device
torchmem_memory_unattributed_bytes train_job,rank,device
torchmem_allocator_memory_allocated_bytes train_job,rank,device
torchmem_allocator_memory_active_bytes train_job,rank,device
torchmem_allocator_memory_reserved_bytes train_job,rank,device
torchmem_allocator_memory_inactive_split_bytes train_job,rank,device
torchmem_allocator_fragmentation_ratio train_job,rank,device
torchmem_allocator_ooms_total train_job,rank,device
torchmem_allocator_retries_total train_job,rank,device
torchmem_device_memory_limit_bytes train_job,rank,device
torchmem_device_memory_other_bytes train_job,rank,device
torchmem_checkpoint_memory_peak_bytes train_job,rank,device,operation
torchmem_memory_baseline_bytes train_job,rank,device
torchmem_memory_drift_ratio train_job,rank,device
torchmem_memory_drifting train_job,rank,device,detector
torchmem_memory_growth_bytes_per_second train_job,rank,device
torchmem_memory_exhaustion_timestamp_seconds train_job,rank,device
torchmem_memory_forecast_bytes train_job,rank,device
torchmem_memory_forecast_drift_ratio train_job,rank,device
torchmem_memory_baseline_resets_total train_job,rank,device,reason
torchmem_step_number train_job,rank
torchmem_steps_total train_job,rank
torchmem_step_time_seconds_total train_job,rank
torchmem_tracker_time_seconds_total train_job,rank
torchmem_snapshot_timestamp_seconds train_job,rank
torchmem_rank_start_timestamp_seconds train_job,rank
torchmem_rank_up train_job,rank
torchmem_rank_state train_job,rank,state
torchmem_rank_info train_job,rank,attempt,pid,host,engine,gpu_uuid,dp,tp,pp
torchmem_labeler_up train_job,rank,labeler
torchmem_modules_folded train_job,rank
torchmem_job_world_size train_job
torchmem_snapshot_errors_total reason
torchmem_exporter_unburied
torchmem_exporter_state_failures_total
torchmem_exporter_requests_total code
torchmem_exporter_requests_refused_total reason
torchmem_exporter_reload_failures_total
torchmem_exporter_otlp_pushes_total outcome
torchmem_exporter_otlp_dropped_points_total
torchmem_exporter_otlp_push_duration_seconds
torchmem_build_info version,torch
torchmem_scrape_duration_seconds
""".strip().splitlines()


def test_names_and_labels():
    """A dashboard or an alert would ask for a series that no longer exists."""
    assert [f"{m.prometheus_name} {','.join(m.labels)}".rstrip() for m in catalog.METRICS] == NAMES


def test_every_metric_is_rendered():
    """A metric would be declared and never served."""
    declared = [value for value in vars(catalog).values() if isinstance(value, Metric)]
    assert sorted(m.otel_name for m in declared) == sorted(m.otel_name for m in catalog.METRICS)


def test_help_is_one_line():
    """A help text would break the exposition or say nothing."""
    assert [m.otel_name for m in catalog.METRICS if not m.help.endswith(".") or "\n" in m.help] == []


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("a.b_c", "By", Kind.UPDOWN, "a_b_c_bytes"),
        ("a.bytes.peak", "By", Kind.GAUGE, "a_bytes_peak"),
        ("a.time", "s", Kind.COUNTER, "a_time_seconds_total"),
        ("a.steps", "{step}", Kind.COUNTER, "a_steps_total"),
        ("a.fill", "1", Kind.GAUGE, "a_fill_ratio"),
        ("a.fill_ratio", "1", Kind.GAUGE, "a_fill_ratio"),
        ("a.fill", "1", Kind.UPDOWN, "a_fill"),
        ("a.up", "", Kind.GAUGE, "a_up"),
        ("a.growth", "By/s", Kind.GAUGE, "a_growth_bytes_per_second"),
    ],
)
def test_translation_is_that_of_opentelemetry(name, unit, kind, expected):
    """The same metric would have two names, one scraped and one pushed through a collector."""
    assert catalog.prometheus_name(name, unit, kind) == expected
