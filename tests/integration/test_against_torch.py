"""torchmem against torch's own FSDP2 memory tracker, byte for byte: equal, but for differences that have a name.

Both watch runs of the same jobs in which every run allocates alike (``jobs.reftypes``). A difference is a number of
bytes that torch books under one reftype, or does not see, and torchmem under another; each is explained here once and
its bytes are worked out from the job, not from what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from jobs.fsdp2 import VARIANTS
from jobs.model import Block, Transformer
from jobs.ranks import run_alone
from jobs.reftypes import SIZES, Compared, cases, compare

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobs.reftypes import Case

    Explanation = Callable[[Case, Compared], "Difference"]

pytestmark = pytest.mark.slow

CASES = {(case.variant.name, case.size): case for world_size in (2, 4) for case in cases(world_size)}
MESH_BYTES = 64
"""What device meshes keep of their ranks' numbers, at most: there before either tracker comes."""
FP32 = 4


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Compared]:
    """Every job seen by both."""
    directory = str(tmp_path_factory.mktemp("records"))
    return {key: value for world_size in (2, 4) for key, value in run_alone(compare, world_size, directory).items()}


class Difference(NamedTuple):
    """Bytes that torch books under one reftype (None: does not see) and torchmem under another."""

    torch: str | None
    ours: str
    num_bytes: int


def seen_targets(case: Case, _: Compared) -> Difference:
    """The targets are no argument of the model: torch meets them in the loss and calls them activation."""
    return Difference("activation", "other", _targets_bytes(case))


def unseen_targets(case: Case, _: Compared) -> Difference:
    """Targets of a loss not computed yet at the peak: torch has not met them."""
    return Difference(None, "other", _targets_bytes(case))


def young_gradients(_: Case, compared: Compared) -> Difference:
    """Unsharded gradients are that from their birth; torch calls them temporary until their group's post-backward."""
    return Difference("temporary", "unsharded_gradient", compared.ours.peak.get("unsharded_gradient", 0))


def accumulated_gradients(case: Case, _: Compared) -> Difference:
    """Unsharded gradients kept in float32 under mixed precision: torch never notices that they are gradients."""
    return Difference("temporary", "unsharded_gradient", FP32 * _numel(case, Transformer))


def optimizer_scratch(case: Case, _: Compared) -> Difference:
    """AdamW's foreach temporaries, one per sharded parameter: torch calls all that a step allocates its state."""
    return Difference("optimizer_state", "temporary", FP32 * _numel(case, Transformer) // case.variant.world_size)


def optimizer_scalars(_: Case, __: Compared) -> Difference:
    """Numbers wrapped as tensors inside a kernel: torch sees what is dispatched, not what a kernel allocates."""
    return Difference(None, "temporary", 12)


def hidden_state(_: Case, compared: Compared) -> Difference:
    """The state of an optimizer that was not passed in: torchmem finds it, torch has never met its tensors."""
    return Difference(None, "optimizer_state", compared.ours.storages["optimizer_state"])


def rearranged_parameters(case: Case, _: Compared) -> Difference:
    """Scratch in which FSDP2 rearranges a block's matrices gathered along another dimension than the first."""
    matrices = sum(p.numel() for p in _meta(case, Block).parameters() if p.dim() > 1)
    return Difference("temporary", "all_gather", FP32 * matrices)


def forward_scratch(case: Case, _: Compared) -> Difference:
    """Freed before its module returned, so it was no activation; torch calls all that a forward allocates that."""
    return Difference("activation", "temporary", SIZES[case.size].scratch_bytes)


def inner_results(case: Case, _: Compared) -> Difference:
    """The embedding's result, added to and let go of inside the root's forward: the same, without gradients."""
    return Difference("activation", "temporary", _hidden_bytes(case))


def late_inputs(case: Case, _: Compared) -> Difference:
    """Tokens of an evaluation, made in it: torch is told of inputs beforehand or calls them activation."""
    return Difference("activation", "input", _targets_bytes(case))


def cast_inputs(case: Case, _: Compared) -> Difference:
    """A block's inputs cast to the gathered type: let go of before its call is over, so they were no activation."""
    return Difference("activation", "temporary", _hidden_bytes(case) // 2)


def young_parameters(case: Case, _: Compared) -> Difference:
    """A group's unsharded parameters while they are being made: torch names them when its pre-forward is over."""
    return Difference("activation", "unsharded_parameter", _gathered_bytes(case))


def young_gather(case: Case, _: Compared) -> Difference:
    """The all-gather's buffer before the collective is called: torch recognises it by the call."""
    return Difference("activation", "all_gather", _gathered_bytes(case))


def cast_copy(case: Case, _: Compared) -> Difference:
    """The sharded parameters cast to the gathered type, all-gather's input: torch calls it activation."""
    return Difference("activation", "all_gather", _gathered_bytes(case) // case.variant.world_size)


def _meta(case: Case, kind: type[Transformer | Block]) -> torch.nn.Module:
    with torch.device("meta"):
        return kind(SIZES[case.size])


def _numel(case: Case, kind: type[Transformer | Block]) -> int:
    return sum(p.numel() for p in _meta(case, kind).parameters())


def _gathered_bytes(case: Case) -> int:
    return _numel(case, Block) * (2 if case.variant.mixed_precision else FP32)


def _targets_bytes(case: Case) -> int:
    return SIZES[case.size].batch * SIZES[case.size].seq * torch.int64.itemsize


def _hidden_bytes(case: Case) -> int:
    return SIZES[case.size].batch * SIZES[case.size].seq * SIZES[case.size].width * FP32


USUAL: tuple[Explanation, ...] = (seen_targets, young_gradients)
EXPLAINED: dict[tuple[str, str], tuple[Explanation, ...]] = {
    ("reshard", "backward"): USUAL,
    ("reshard", "optimizer"): USUAL,
    ("reshard", "forward"): (unseen_targets, forward_scratch),
    ("reshard", "evaluation"): (late_inputs, inner_results, young_parameters),
    ("reshard", "unshard"): (young_gather,),
    ("keep", "backward"): USUAL,
    ("keep", "optimizer"): USUAL,
    ("mixed", "backward"): USUAL,
    ("mixed", "optimizer"): (seen_targets, optimizer_scratch, optimizer_scalars),
    ("mixed", "forward"): (unseen_targets, forward_scratch),
    ("mixed", "evaluation"): (late_inputs, inner_results, young_parameters, cast_inputs),
    ("mixed", "unshard"): (young_gather, cast_copy),
    ("mixed_keep", "backward"): USUAL,
    ("mixed_keep", "optimizer"): (seen_targets, optimizer_scratch, optimizer_scalars),
    ("grouped_head", "optimizer"): USUAL,
    ("shard_dim_1", "backward"): USUAL,
    ("shard_dim_1", "optimizer"): (*USUAL, rearranged_parameters),
    ("no_foreach", "backward"): USUAL,
    ("no_foreach", "optimizer"): USUAL,
    ("accumulate", "backward"): (seen_targets, seen_targets),
    ("accumulate", "optimizer"): (seen_targets, unseen_targets),
    ("mixed_accumulate", "backward"): (seen_targets, seen_targets, accumulated_gradients),
    ("hidden_optimizer", "backward"): (*USUAL, hidden_state),
    ("hidden_optimizer", "optimizer"): (*USUAL, hidden_state),
    ("reshard_to_2_of_4", "backward"): USUAL,
    ("reshard_to_2_of_4", "optimizer"): USUAL,
}
TORCH_FAILS = {("two_groups", "backward"), ("two_groups", "optimizer")}
TORCH_IS_WRONG = {("grouped_head", "backward"), ("mixed_accumulate", "optimizer")}


def test_every_case_is_judged() -> None:
    """A job would be compared without anybody having said what is to be expected of it."""
    assert EXPLAINED.keys() | TORCH_FAILS | TORCH_IS_WRONG == CASES.keys()


@pytest.mark.parametrize("key", EXPLAINED, ids="-".join)
def test_composition_differs_only_where_explained(
    compared: dict[tuple[str, str], Compared], key: tuple[str, str]
) -> None:
    """A reftype would hold bytes at the peak that belong to another, or torch's tracker have changed its mind."""
    expected = dict(compared[key].torch)
    for explain in EXPLAINED[key]:
        difference = explain(CASES[key], compared[key])
        if difference.torch:
            expected[difference.torch] = expected.get(difference.torch, 0) - difference.num_bytes
        expected[difference.ours] = expected.get(difference.ours, 0) + difference.num_bytes
    assert compared[key].ours.peak == {reftype: num_bytes for reftype, num_bytes in expected.items() if num_bytes}


@pytest.mark.parametrize("key", CASES, ids="-".join)
def test_total_is_the_truth(compared: dict[tuple[str, str], Compared], key: tuple[str, str]) -> None:
    """The peak would be wrong even where torch's tracker errs or gives up."""
    assert 0 <= compared[key].ours.true_peak - sum(compared[key].ours.peak.values()) <= MESH_BYTES


def test_torch_gives_up_on_several_groups_a_module(compared: dict[tuple[str, str], Compared]) -> None:
    """torch would have learned to track several parameter groups a module: compare them then."""
    for key in TORCH_FAILS:
        assert "at most 1 param group" in compared[key].torch_error


def test_torch_measures_another_program_for_grouped_modules(compared: dict[tuple[str, str], Compared]) -> None:
    """torch would no longer reshard a group between its modules while tracking: compare the compositions then."""
    case = compared["grouped_head", "backward"]
    assert case.ours.true_peak - case.torch_total > 0.02 * case.ours.true_peak


def test_torch_misses_copies_made_inside_a_kernel(compared: dict[tuple[str, str], Compared]) -> None:
    """torch would see the float32 copies that the reduce-scatter makes of bfloat16 gradients: compare then."""
    case = compared["mixed_accumulate", "optimizer"]
    largest = max(p.numel() for p in _meta(CASES["mixed_accumulate", "optimizer"], Block).parameters())
    assert 0 < case.ours.true_peak - case.torch_total <= FP32 * largest


def test_two_groups_compose_as_one_does(compared: dict[tuple[str, str], Compared]) -> None:
    """Splitting a block's parameters over two groups would change what the same bytes are called."""
    for size in ("backward", "optimizer"):
        assert compared["two_groups", size].ours.peak == compared["reshard", size].ours.peak


def test_variants_are_all_compared() -> None:
    """A variant added to the jobs would not be compared with torch."""
    assert {name for name, _ in CASES} == {variant.name for variant in VARIANTS}
