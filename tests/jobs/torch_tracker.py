"""torch's own FSDP2 memory tracker, driven the way its authors' tests drive it.

``FSDPMemTracker`` leaves things behind: bound methods on every parameter group that shadow those of their class, and
references that keep the sharded parameters alive. The first is put back here; the second is a known limit, so a process
that used the tracker holds the parameters of every job it tracked.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs.model import Job

TOTAL = "Total"


@contextlib.contextmanager
def tracked(job: Job, *, optimizer_passed: bool = True) -> Iterator[FSDPMemTracker]:
    """A running tracker of the job; parameter groups have their own methods again afterwards."""
    tracker = FSDPMemTracker(job.model, job.optimizer if optimizer_passed else None)
    try:
        with tracker:
            yield tracker
    finally:
        for module in job.model.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    vars(group).pop("pre_backward", None)
                    vars(group).pop("post_backward", None)


def step_peak(job: Job, *, optimizer_passed: bool = True) -> dict[str, int]:
    """Runs one step under a fresh tracker; returns its composition at the peak, in bytes by display name."""
    batches = job.batches()
    with tracked(job, optimizer_passed=optimizer_passed) as tracker:
        tracker.track_inputs(tuple(batch.tokens for batch in batches))
        job.step(batches, before_microbatch=tracker.reset_mod_stats)
    return _peak(tracker)


def peak_of(job: Job, what: Callable[[Job], None]) -> dict[str, int]:
    """The same of anything done with the job."""
    with tracked(job) as tracker:
        what(job)
    return _peak(tracker)


def _peak(tracker: FSDPMemTracker) -> dict[str, int]:
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(key, "value", key)): num_bytes for key, num_bytes in snapshot.items() if num_bytes}
