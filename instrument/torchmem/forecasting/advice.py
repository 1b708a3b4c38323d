"""What would have to shrink for a forecast to fit a device.

Invariant: only what is there at the peak is named, largest first; shrinking anything else would not help.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torchmem.forecasting.outcome import StepForecast
from torchmem.model import RefType, folded

HINTS: dict[RefType, str] = {
    RefType.PARAMETER: "shard the parameters (fully_shard), or keep them in a smaller type",
    RefType.BUFFER: "keep fewer buffers on the device",
    RefType.GRADIENT: "shard the gradients (fully_shard), or set them to None before the forward",
    RefType.OPTIMIZER_STATE: "shard it (fully_shard, ZeroRedundancyOptimizer), or an optimizer that keeps less",
    RefType.INPUT: "a smaller batch",
    RefType.SHARDED_PARAMETER: "shard over more ranks, or offload to the host",
    RefType.UNSHARDED_PARAMETER: "shard smaller modules each, with reshard_after_forward",
    RefType.SHARDED_GRADIENT: "shard over more ranks, or offload to the host",
    RefType.UNSHARDED_GRADIENT: "shard smaller modules each, and reduce the gradients of every micro-batch",
    RefType.ALL_GATHER: "shard smaller modules each, or gather in a smaller type",
    RefType.REDUCE_SCATTER: "shard smaller modules each, or reduce in a smaller type",
    RefType.ALL_REDUCE: "shard smaller modules each",
    RefType.GRADIENT_BUCKET: "gradient_as_bucket_view=True, so that gradients lie in the buckets",
    RefType.ACTIVATION: "recompute them (activation checkpointing), or a smaller batch or sequence",
    RefType.RECOMPUTATION: "checkpoint smaller modules each",
    RefType.TEMPORARY: "a smaller batch, the loss in chunks, or fused=True in the optimizer",
    RefType.CHECKPOINT: "save shards instead of the whole, or between steps",
    RefType.OTHER: "free what is held outside of the model, or make it on the host",
}
"""What makes each reference type smaller."""

MAX_CANDIDATES = 6


class Candidate(NamedTuple):
    """Something that could shrink.

    Attributes:
        reftype: what it is.
        module: the modules that hold most of it, indices folded.
        num_bytes: all that there is of it at the peak.
        share: the part of it that would have to go for the peak to fit by that alone; over 1 where it is not enough.
        hint: how.
    """

    reftype: str
    module: str
    num_bytes: int
    share: float
    hint: str


def candidates(step: StepForecast, capacity_bytes: int) -> list[Candidate]:
    """What would have to shrink for a step to fit, largest first; empty where it fits."""
    over = step.peak_bytes - capacity_bytes
    if over <= 0:
        return []
    by_module: dict[str, Counter[str]] = {}
    for cell in step.cells:
        by_module.setdefault(cell.reftype, Counter())[folded(cell.module)] += cell.num_bytes
    found = [
        Candidate(reftype, by_module[reftype].most_common(1)[0][0], num_bytes, over / num_bytes, _hint(reftype))
        for reftype, num_bytes in step.by_reftype.items()
        if num_bytes > 0
    ]
    return found[:MAX_CANDIDATES]


def _hint(reftype: str) -> str:
    return HINTS[RefType[reftype.upper()]]
