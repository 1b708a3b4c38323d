"""What jobs do in the midst of samples, and with steps, that the sampler must stand."""

from __future__ import annotations

import struct
import sys
import threading

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchmem import monitor
from torchmem.engine.dispatch_mode import take_off_ended
from torchmem.engine.fast_ledger import FastLedger
from torchmem.model import RefType
from torchmem.sampling import sampler as sampling
from torchmem.sampling.sampler import StepSampler

SIZE = 64


class Job:
    """A model with an optimizer, and a sampler of every second step."""

    def __init__(self, *, passed=True):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.new = []
        self.sampler = StepSampler(
            self.model,
            self.optimizer if passed else None,
            depth=2,
            every=2,
            on_step=self.end_step,
            before_forward=lambda _: None,
        )
        self.sampler.attach()

    def end_step(self):
        """As a monitor does."""
        if self.sampler.end_step():
            self.new.append(self.sampler.num_steps)

    def step(self, optimizer=None):
        """Trains once."""
        self.model(torch.ones(4, SIZE)).sum().backward()
        (optimizer or self.optimizer).step()
        self.model.zero_grad()


@pytest.fixture
def job():
    """A job that gives its optimizer to its sampler."""
    yield from jobs(passed=True)


@pytest.fixture
def finding_job():
    """One that does not."""
    yield from jobs(passed=False)


def jobs(*, passed):
    torch._dynamo.utils.counters.clear()  # what other tests compiled
    made = Job(passed=passed)
    yield made
    made.sampler.detach()
    take_off_ended()
    assert _get_current_dispatch_mode_stack() == []


def bytes_at_peak(sampler, reftype):
    ((_, _, _, at_peak, _),) = sampler.native.last.rows
    return struct.unpack(f"<{len(RefType)}q", at_peak)[reftype]


def test_steps_that_end_in_inference_mode(job):
    """A loop that validates in inference mode and ends its steps there would break torch for its thread."""
    job.step()
    assert job.sampler.is_sampling
    with torch.inference_mode():
        job.end_step()
        assert not job.sampler.is_sampling
        job.end_step()
        assert "inference mode" in job.sampler.reason
    torch.empty(3)
    assert job.new == [2]
    job.step()
    assert _get_current_dispatch_mode_stack() == []
    for _ in range(2):
        job.step()
    assert job.new == [2, 6]


def test_detached_in_inference_mode(job):
    """A job that closes its monitor after an evaluation could not use torch any more."""
    job.step()
    with torch.inference_mode():
        job.sampler.detach()
    assert torch.ones(3).sum() == 3


def test_detached_in_a_backward_hook(job):
    """The next monitor would take the mode for one of the job's own, and never sample."""
    job.step()
    output = job.model(torch.ones(4, SIZE))
    output.register_hook(lambda _: job.sampler.detach())
    output.sum().backward()
    other = Job()
    for _ in range(2):
        other.step()
    other.sampler.detach()
    assert (other.new, other.sampler.reason) == ([2], "")


def test_no_sample_changes_torchs_tables(job):
    """A step that ends in a hook of the job's own would raise: torch goes through the table just then."""
    tables = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    before = [list(table) for table in tables]
    handle = register_optimizer_step_post_hook(lambda *_: job.end_step())
    try:
        for _ in range(3):
            job.step()
            assert [set(table) - {handle.id} for table in tables] == [set(keys) for keys in before]
    finally:
        handle.remove()
    assert job.sampler.num_steps == 6
    assert job.sampler.labelers[0].hooks.failure == ""


def test_an_optimizer_that_takes_anothers_place(finding_job):
    """The sample that ends with its first step would raise into the training."""
    finding_job.step()
    finding_job.optimizer = torch.optim.SGD(finding_job.model.parameters(), 0.1)
    for _ in range(3):
        finding_job.step()
    assert (finding_job.sampler.num_steps, finding_job.new) == (4, [2, 4])


def test_tables_are_as_before_when_detached():
    """Hooks of a sampler that is gone would stay in torch for the rest of the process."""
    tables = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
    before = [dict(table) for table in tables]
    job = Job()
    job.step()
    assert [dict(table) for table in tables] != before
    job.sampler.detach()
    assert [dict(table) for table in tables] == before


def test_state_of_every_optimizer_is_in_the_peak(job):
    """A job with two optimizers would seem to hold the state of one."""
    other = torch.optim.Adam(job.model.parameters())
    for _ in range(4):
        job.model(torch.ones(4096, SIZE)).sum().backward()  # the peak
        other.step()
        job.step()
    of_each = 2 * sum(parameter.untyped_storage().nbytes() for parameter in job.model.parameters())
    assert bytes_at_peak(job.sampler, RefType.OPTIMIZER_STATE) >= 2 * of_each


def test_a_step_that_only_makes_state_is_none(job):
    """A job that resumes would be a step ahead of what it has done, and its samples of other steps."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    get_optimizer_state_dict(job.model, job.optimizer)
    assert job.optimizer.state
    assert job.sampler.num_steps == 0
    for _ in range(2):
        job.step()
    assert (job.sampler.num_steps, job.new) == (2, [2])
    assert "torch.distributed.checkpoint.state_dict" in sys.modules


def test_a_sample_whose_step_never_ends_is_dropped(job, monkeypatch):
    """A job that goes on with another optimizer would be sampled for ever, ever slower and larger."""
    monkeypatch.setattr(sampling, "MAX_FORWARDS_IN_STEP", 5)
    call = nn.Module.__call__
    job.step()
    assert nn.Module.__call__ is not call
    other = torch.optim.SGD(job.model.parameters(), 0.1)
    for _ in range(5):
        job.step(other)
    assert not job.sampler.is_sampling
    assert nn.Module.__call__ is call
    assert _get_current_dispatch_mode_stack() == []
    assert "no step has ended in 5 forwards" in job.sampler.labelers[0].hooks.failure
    for _ in range(4):
        job.step()
    assert job.new == [4]
    assert job.sampler.labelers[0].hooks.failure == ""


def test_the_mark_is_the_monitors():
    """A sample would be dropped before, or long after, the monitor says that no step ends."""
    assert sampling.MAX_FORWARDS_IN_STEP == monitor.MAX_FORWARDS_IN_STEP


def test_a_step_that_a_signals_handler_ends(job, monkeypatch):
    """Half-written books would be published, or no step be sampled any more."""
    allocate, calls = FastLedger.allocate, []

    def in_the_midst(*arguments):
        allocate(*arguments)
        if job.sampler.is_sampling and not calls:
            calls.append(1)
            job.end_step()

    def train():
        job.step()
        monkeypatch.setattr(FastLedger, "allocate", in_the_midst)
        job.model(torch.ones(4, SIZE))
        seen.append(job.sampler.reason)
        for _ in range(2):
            job.step()

    seen = []
    thread = threading.Thread(target=train, daemon=True)  # a deadlock fails the test instead of hanging it
    thread.start()
    thread.join(20)
    assert calls == [1]
    assert ["signal's handler" in reason for reason in seen] == [True]
    assert job.new == [4]
