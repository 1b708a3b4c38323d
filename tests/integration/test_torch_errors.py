"""Where torch's own memory trackers are wrong, and torchmem's ``MemTracker`` is right, to the byte.

Each test says both: that torch's tracker errs on the job, so that the test proves itself, and what is true. A test
that fails in its first part says that torch has mended its tracker.
"""

from __future__ import annotations

import pytest

from jobs.ranks import run_alone, run_ranks
from jobs.torch_errors import LAYER_BYTES, NUM_SCALED, WIDTH, Said, all_errors, ddp_buckets
from torchmem.labelers.module_stats import KEPT_SNAPSHOTS

pytestmark = pytest.mark.slow

HIDDEN_BYTES = WIDTH * 4
STEP_COUNTER_BYTES = 4


@pytest.fixture(scope="module")
def said() -> dict[str, Said]:
    """What both trackers said of every job but DDP's."""
    return run_alone(all_errors, 2)


def test_optimizer_temporaries_are_no_optimizer_state(said: dict[str, Said]) -> None:
    """The scratch of a foreach optimizer would count as its state: 24 MiB said, 16 true."""
    case = said["optimizer_scratch"]
    state = 4 * LAYER_BYTES + 2 * STEP_COUNTER_BYTES
    assert case.torch["Optstate"] == state + 2 * LAYER_BYTES
    assert case.ours["OptState"] == state
    assert case.ours["Temp"] == 2 * LAYER_BYTES + 3 * STEP_COUNTER_BYTES  # and three numbers that a kernel wraps


def test_an_exception_in_the_optimizer_ends_its_phase(said: dict[str, Said]) -> None:
    """After a failed optimizer step every activation would count as optimizer state."""
    case = said["failed_step"]
    assert case.torch["Optstate"] == 3 * HIDDEN_BYTES
    assert "Activation" not in case.torch
    assert case.ours == {
        "Parameter": 2 * LAYER_BYTES,
        "Inputs": HIDDEN_BYTES,
        "Activation": 2 * HIDDEN_BYTES,
        "Total": 2 * LAYER_BYTES + 3 * HIDDEN_BYTES,
    }


def test_a_second_iteration_needs_no_reset(said: dict[str, Said]) -> None:
    """A loop of more than one step would raise."""
    case = said["second_iteration"]
    assert case.torch["error"] == "NotImplementedError"
    assert case.ours["error"] == ""


def test_snapshots_do_not_grow_with_each_iteration(said: dict[str, Said]) -> None:
    """A module that is called over and over would keep a snapshot of every call."""
    case = said["many_calls"]
    assert case.torch == {50: 50, 100: 100}
    assert case.ours == {50: KEPT_SNAPSHOTS, 100: KEPT_SNAPSHOTS}


def test_every_storage_of_a_subclass_counts(said: dict[str, Said]) -> None:
    """Of a tensor with several storages, one of them known, the others would be missed."""
    case = said["several_storages"]
    assert case.true["num_bytes"] == NUM_SCALED * HIDDEN_BYTES
    assert case.torch["num_bytes"] == 0
    assert case.ours["num_bytes"] == case.true["num_bytes"]


def test_compiled_models_stay_compiled(said: dict[str, Said]) -> None:
    """Entering the tracker would turn torch.compile off, also for what runs after it."""
    case = said["compiled"]
    assert case.torch == {"inside": 0, "after": 0}
    assert case.ours == {"inside": 3, "after": 3}


def test_accumulated_gradients_are_gradients(said: dict[str, Said]) -> None:
    """Gradients that mixed precision keeps unsharded in float32 would count as temporary."""
    case = said["accumulated_gradients"]
    gradients = case.true["parameter_bytes"]
    assert case.torch["Temp"] == gradients
    assert "Unsharded Grad" not in case.torch
    assert case.ours["Unsharded Grad"] == gradients
    assert "Temp" not in case.ours
    assert case.ours["Total"] == case.torch["Total"]


def test_an_optimizer_not_passed_in_is_found(said: dict[str, Said]) -> None:
    """The state of an optimizer that the tracker was not given would count as activation."""
    case = said["hidden_optimizer"]
    state = 2 * case.true["local_bytes"] + case.true["num_parameters"] * STEP_COUNTER_BYTES
    assert case.torch["Activation"] == state
    assert "OptState" not in case.torch
    assert case.ours["OptState"] == state
    assert "Activation" not in case.ours


def test_a_full_state_dict_is_a_checkpoint(said: dict[str, Said]) -> None:
    """A gathered state dict would count as activation."""
    case = said["full_state_dict"]
    gathered = case.true["parameter_bytes"]
    assert case.torch["Activation"] == gathered
    assert case.ours["Checkpoint"] == gathered
    assert case.ours.get("Activation", 0) == 0
    assert case.ours["Total"] == case.torch["Total"] == gathered


def test_a_module_may_have_several_parameter_groups(said: dict[str, Said]) -> None:
    """A module whose parameters are split over two process groups could not be tracked at all."""
    case = said["several_groups"]
    assert "at most 1 param group" in case.torch["error"]
    assert case.ours["error"] == ""
    assert case.ours["Sharded Param"] == case.true["local_bytes"]
    assert case.ours["states"] == dict.fromkeys(case.ours["states"], 1)
    assert len(case.ours["states"]) == 10  # all but those of recomputation


def test_hooks_are_left_as_they_were(said: dict[str, Said]) -> None:
    """Leaving the tracker would put FSDP's hooks behind others, without the options with which they were made."""
    case = said["hooks_after"]
    assert case.torch["order"] != case.true["order"]
    assert case.torch["always_called"] != case.true["always_called"]
    assert case.ours == case.true


def test_buckets_are_gradient_buckets() -> None:
    """DDP's buckets would count as temporary after a backward and as activation once they were rebuilt."""
    (case,) = run_ranks(ddp_buckets, 1)
    buckets = case.true["bucket_bytes"]
    assert case.torch["after_backward"]["Temp"] == buckets
    assert case.torch["after_forward"]["Activation"] == buckets + 3 * HIDDEN_BYTES
    for moment in ("after_backward", "after_forward"):
        assert "Gradient Bucket" not in case.torch[moment]
        assert case.ours[moment]["Gradient Bucket"] == buckets
    assert "Temp" not in case.ours["after_backward"]
    assert case.ours["after_forward"]["Inputs"] == HIDDEN_BYTES
