"""Whole jobs, forecast: every way of training, without its ranks, and nothing left behind."""

from __future__ import annotations

import copy
import inspect
import io
import json
import os
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchmem
from jobs import forecast_models as models
from torchmem.cli import main
from torchmem.engine.adaptations import LazyChunks

RANKS = 1024
GIB = 1 << 30


def build_ddp(world_size, *, bucket_view=False):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(models.Decoder(*models.SIZES["tiny"]), gradient_as_bucket_view=bucket_view)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, models.step_of(model, optimizer, 1, 128)


def build_fsdp1(world_size):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = models.Decoder(*models.SIZES["tiny"])
    for index, layer in enumerate(model.layers):
        model.layers[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), use_orig_params=True)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, models.step_of(model, optimizer, 1, 128)


def build_mixed(mesh):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = models.Decoder(*models.SIZES["tiny"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, models.step_of(model, optimizer, 1, 128)


def build_own_group():
    """As a script does that is started by torchrun."""
    dist.init_process_group("nccl")
    model = nn.Linear(dist.get_world_size(), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
    return model, None, lambda: model(torch.ones(1, model.in_features)).sum().backward()


def parameter_bytes(size="tiny"):
    with torch.device("meta"):
        return sum(4 * p.numel() for p in models.Decoder(*models.SIZES[size]).parameters())


@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_optimizer_state_of_a_rank_is_a_shard(optimizer):
    """DTensor's sharding propagation would be booked: the state of the whole model on each of 1,024 ranks."""
    found = torchmem.forecast(models.fsdp2, world_size=RANKS, arguments={"optimizer": optimizer, "sequence": 16})
    assert found.ranks[0].notes == []
    state, shard = found.by_reftype["optimizer_state"], found.by_reftype["sharded_parameter"]
    assert 2 * shard <= state <= 2 * shard + 8 * 100  # two tensors of each parameter's size, and a count
    assert shard < 4 * parameter_bytes() / RANKS


def test_torchs_tracker_books_the_whole_state_on_each_rank():
    """torch's own tracker would be right by now, and the engine's pauses needless."""
    arguments = {"optimizer": "fused", "sequence": 16}
    theirs = models.job_under_torch_tracker(models.fsdp2, RANKS, **arguments)
    ours = torchmem.forecast(models.fsdp2, world_size=RANKS, arguments=arguments)
    assert theirs["OptState"] > 2 * parameter_bytes()
    assert theirs["OptState"] > 500 * ours.by_reftype["optimizer_state"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_optimizer_state_of_6_7_billion_parameters_on_1024_ranks(optimizer):
    """The figure that the forecast exists for: 0.05 GiB, where torch's tracker says 75."""
    arguments = {"size": "6.7B", "optimizer": optimizer, "sequence": 2048}
    found = torchmem.forecast(models.fsdp2, world_size=RANKS, arguments=arguments)
    assert round(found.by_reftype["optimizer_state"] / GIB, 2) == 0.05


@pytest.mark.slow
def test_torchs_tracker_says_75_gib_of_6_7_billion_parameters():
    """torch's own tracker would be right by now for foreach optimizers too."""
    theirs = models.job_under_torch_tracker(models.fsdp2, RANKS, size="6.7B", sequence=2048)
    assert theirs["OptState"] > 70 * GIB


def test_what_a_plain_job_holds():
    """Parameters, gradients and state would not be those that are known beforehand."""
    found = torchmem.forecast(models.plain)
    assert found.by_reftype["parameter"] == found.by_reftype["gradient"] == parameter_bytes()
    assert 0 <= found.by_reftype["optimizer_state"] - 2 * parameter_bytes() < 1000
    first, steady = found.ranks[0].devices[0].steps
    assert (first.name, steady.name) == ("first", "steady")
    assert steady.end_bytes == pytest.approx(4 * parameter_bytes(), rel=0.001)
    assert sum(cell.num_bytes for cell in steady.cells) == steady.peak_bytes
    assert found.ranks[0].devices[0].construction_peak_bytes >= parameter_bytes()


def test_converted_modules_are_counted_in_their_new_type():
    """``model.to(dtype)`` fails on torch's fake tensors, and then would hold both types."""
    found = torchmem.forecast(models.plain, arguments={"wide": True, "sequence": 4})
    assert found.by_reftype["parameter"] == 2 * parameter_bytes()


def test_accumulated_micro_batches_hold_no_more():
    """The activations of one micro-batch would be counted together with those of the next."""
    two, eight = (torchmem.forecast(models.plain, arguments={"num_microbatches": number}) for number in (2, 8))
    assert eight.by_reftype == two.by_reftype


def test_recomputed_activations_are_not_held():
    """Activation checkpointing would not make the forecast smaller."""
    plain = torchmem.forecast(models.fsdp2, world_size=8, arguments={"batch": 16})
    recomputed = torchmem.forecast(models.fsdp2, world_size=8, arguments={"batch": 16, "recompute": True})
    assert recomputed.by_reftype["activation"] < 0.7 * plain.by_reftype["activation"]
    assert recomputed.peak_bytes < plain.peak_bytes


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_has_buckets(bucket_view):
    """DDP's buckets are made in C++: they would be other bytes, and gradients be counted beside their own views."""
    found = torchmem.forecast(build_ddp, world_size=RANKS, arguments={"bucket_view": bucket_view})
    assert found.ranks[0].notes == []
    (_, steady) = found.ranks[0].devices[0].steps
    assert found.by_reftype["gradient_bucket"] == pytest.approx(parameter_bytes(), rel=0.001)
    assert steady.end_bytes == pytest.approx((5 - bucket_view) * parameter_bytes(), rel=0.001)


def test_fsdp1_shards():
    """FSDP1's flat parameters would be forecast whole on each rank."""
    found = torchmem.forecast(build_fsdp1, world_size=64)
    assert found.ranks[0].notes == []
    assert found.by_reftype["sharded_parameter"] == pytest.approx(parameter_bytes() / 64, rel=0.01)
    assert found.by_reftype["optimizer_state"] == pytest.approx(2 * parameter_bytes() / 64, rel=0.01)


def test_mixed_precision_gathers_half():
    """The type in which parameters are gathered would be ignored."""
    full = torchmem.forecast(models.fsdp2, world_size=8)
    mixed = torchmem.forecast(build_mixed, world_size=8)
    assert mixed.by_reftype["unsharded_parameter"] == full.by_reftype["unsharded_parameter"] / 2


def test_a_mesh_of_two_dimensions():
    """Tensor parallelism and hybrid sharding would not find their ranks."""
    found = torchmem.forecast(models.tensor_parallel, world_size=64, mesh={"dp": 16, "tp": 4})
    whole = torchmem.forecast(models.tensor_parallel, world_size=16, mesh={"dp": 16, "tp": 1})
    assert found.by_reftype["sharded_parameter"] < whole.by_reftype["sharded_parameter"]
    hybrid = torchmem.forecast(models.fsdp2, world_size=64, mesh={"replicate": 8, "shard": 8})
    sharded = torchmem.forecast(models.fsdp2, world_size=8)
    assert hybrid.by_reftype["sharded_parameter"] == sharded.by_reftype["sharded_parameter"]


def test_ranks_differ_where_their_shards_do():
    """The last rank, whose shards may be empty, would be forecast as the first."""
    found = torchmem.forecast(models.fsdp2, world_size=600, ranks=(599, 0), arguments={"sequence": 4})
    first, last = found.ranks
    assert (first.rank, last.rank) == (0, 599)
    ends = [rank.devices[0].steps[-1].end_bytes for rank in found.ranks]
    assert ends[0] > ends[1]
    assert found.largest.rank == 0


def test_the_cuda_allocators_rounding():
    """Sizes for CUDA would be as requested, and nothing be said of what it reserves."""
    exact = torchmem.forecast(models.plain)
    rounded = torchmem.forecast(models.plain, allocator="cuda")
    assert all(cell.num_bytes % 512 == 0 for cell in rounded.highest.cells)
    assert rounded.peak_bytes >= exact.peak_bytes
    assert rounded.peak_bytes <= rounded.ranks[0].devices[0].reserved_bytes
    assert exact.ranks[0].devices[0].reserved_bytes is None


def test_optimizers_choose_as_on_cuda():
    """On the CPU torch's optimizers work tensor by tensor; forecast for CUDA they would miss foreach's temporaries."""
    exact, cuda = (torchmem.forecast(models.plain, allocator=a, arguments={"sequence": 4}) for a in ("exact", "cuda"))
    at_optimizer = [found.highest.at.phase == "optimizer" for found in (exact, cuda)]
    assert at_optimizer[1]
    assert cuda.by_reftype["temporary"] > 2 * exact.by_reftype.get("temporary", 0)


def test_a_jobs_own_process_group_is_that_of_the_forecast():
    """A script that initialises its process group by itself would fail, or wait for other ranks."""
    found = torchmem.forecast(build_own_group, world_size=RANKS)
    assert found.by_reftype["parameter"] == 4 * (RANKS * RANKS + RANKS)


def state_of_torch():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import optimizer
    from torch.utils import _foreach_utils, _python_dispatch

    owners = (
        *(
            DeviceMesh,
            _fsdp_param,
            ShardingPropagator,
            DistributedDataParallel,
            dist,
            torch.utils,
            torch.UntypedStorage,
        ),
        *(dist.Reducer, threading.Thread, optimizer, _foreach_utils, nn.Module, torch.optim.Optimizer),
    )
    attributes = [(owner, dict(vars(owner))) for owner in owners]
    stance = torch._dynamo.eval_frame._stance.stance
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return attributes, dict(os.environ), modes, dist.is_initialized(), stance


def failing(world_size):
    model = nn.Linear(4, 4)

    def step():
        raise RuntimeError("the job's own")

    return model, None, step


@pytest.mark.parametrize("build", [build_ddp, failing])
def test_nothing_is_left_behind(build):
    """A process that forecasts and then trains would train on a torch that is patched."""
    torchmem.forecast(build_ddp, world_size=2)  # what torch itself imports and registers when first used
    before = state_of_torch()
    try:
        torchmem.forecast(build, world_size=4)
    except torchmem.ForecastError as error:
        assert "the job's own" in str(error)  # noqa: PT017  # only one of the two raises
    assert state_of_torch() == before


def test_the_job_is_not_kept_alive():
    """Forecasts one after the other would fill the host with fake models."""
    kept = []

    def build():
        model, optimizer, step = models.plain(sequence=4)
        kept.append(weakref.ref(model))
        return model, optimizer, step

    torchmem.forecast(build)
    assert kept[0]() is None


def compiled():
    model, optimizer, step = models.plain(sequence=16)
    model.layers[0].compile(backend="eager")
    return model, optimizer, step


def test_what_is_compiled_is_forecast_as_it_runs_eagerly():
    """A compiled model would be compiled for fake tensors, for minutes, or fail."""
    found = torchmem.forecast(compiled)
    assert found.ranks[0].notes == ["compiled modules are forecast as they run eagerly, which holds more"]
    assert found.by_reftype == torchmem.forecast(models.plain, arguments={"sequence": 16}).by_reftype


def test_a_monitor_and_a_forecast_do_not_mix():
    """Both would patch the same functions, and undo each other's patches."""
    with torchmem.MemTracker(nn.Linear(2, 2)), pytest.raises(torchmem.InstallError, match="installed already"):
        torchmem.forecast(models.plain)


def reads_an_integer():
    model = nn.Linear(4, 4)
    return (
        model,
        None,
        lambda: model(torch.ones(int(torch.ones(1, dtype=torch.long).item() + torch.arange(3).sum()), 4)),
    )


def saves():
    model = nn.Linear(4, 4)
    return model, None, lambda: torch.save(model.state_dict(), io.BytesIO())


def resumes():
    model = nn.Linear(4, 4)
    model.load_state_dict(torch.load("/nowhere/model.pt"))
    return model, None, lambda: None


def depends_on_values():
    model = nn.Linear(4, 4)

    def step():
        x = torch.ones(3, 4)
        model(x[x.sum(1) > 0]).sum().backward()

    return model, None, step


def logs_its_loss():
    model = nn.Linear(4, 4)

    def step():
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        assert loss.item() == 0.0
        assert not torch.isnan(loss)

    return model, None, step


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (reads_an_integer, "reads an integer out of a tensor"),
        (depends_on_values, r"test_forecast_jobs.py:\d+: the shape of what aten.nonzero.default returns depends on"),
        (saves, r"test_forecast_jobs.py:\d+: the job saves or loads tensors, .* leave that out of what is forecast"),
        (resumes, r"test_forecast_jobs.py:\d+: FileNotFoundError: .*/nowhere/model.pt"),
        (failing, r"test_forecast_jobs.py:\d+: RuntimeError: the job's own"),
    ],
)
def test_what_fake_tensors_cannot_do_is_named(build, reason):
    """The user would get a traceback through torch's fake tensors, not the line to change."""
    with pytest.raises(torchmem.ForecastError, match=reason):
        torchmem.forecast(build, world_size=2)


def averages_its_weights():
    model = nn.Linear(64, 64)
    average = copy.deepcopy(model)
    assert average.weight.fake_mode is model.weight.fake_mode

    def step():
        model(torch.ones(3, 64)).sum().backward()
        average.requires_grad_(requires_grad=False)(torch.ones(3, 64))

    return model, None, step


def test_a_copy_of_the_model_is_counted_and_copies_nothing_of_torchs():
    """Torch's fake mode, copied with the model, frees its weak references twice: the process would crash later."""
    found = torchmem.forecast(averages_its_weights)
    (device,) = found.ranks[0].devices
    assert device.construction_peak_bytes == 2 * 4 * (64 * 64 + 64)


def test_values_that_are_read_are_zero_and_noted():
    """A step that logs its loss would end the forecast, or its made-up value be taken for a real one."""
    found = torchmem.forecast(logs_its_loss)
    assert found.ranks[0].notes == ["the job read 4 values of tensors, which fake tensors do not have: each was 0"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="fake cuda tensors work where there is CUDA")
def test_where_fake_cuda_tensors_cannot_work_the_way_out_is_named():
    """Autograd would end the whole process: it asks a device that is not there for its stream."""
    with pytest.raises(torchmem.ForecastError, match=r"cannot train on fake cuda tensors .* --allocator cuda"):
        torchmem.forecast(models.plain, device="cuda")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"world_size": 0}, "a job of 0 ranks"),
        ({"world_size": 2, "ranks": (2,)}, "ranks 2 of 2: give some of 0 to 1"),
        ({"world_size": 4, "mesh": {"dp": 3}}, "a mesh of dp=3 has 3 ranks, the job 4"),
        ({"arguments": {"nothing": 1}}, r"plain\(\) takes no nothing: it has size, batch"),
        ({"allocator": "best"}, "allocator 'best': choose one of exact, cuda"),
    ],
)
def test_arguments_that_do_not_fit_together(more, reason):
    """A typing error would be forecast as another job."""
    with pytest.raises(torchmem.ForecastError, match=reason):
        torchmem.forecast(models.plain, **more)


def test_a_function_that_returns_something_else_is_told():
    """The user would get an unpacking error from inside of torchmem."""
    with pytest.raises(torchmem.InstallError, match=r"must return \(model, optimizer or None, step\), not Linear"):
        torchmem.forecast(lambda: nn.Linear(2, 2))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 16, 17])
@pytest.mark.parametrize("num_chunks", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("dim", [0, 1])
def test_lazy_chunks_are_torchs(length, num_chunks, dim):
    """FSDP2 would shard a parameter at other places in a forecast than in the job."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

    if length == 0 and dim == 1:
        pytest.skip("torch's own fails")
    tensor = torch.arange(2 * length).reshape((length, 2) if dim == 0 else (2, length))
    expected, lazy = _chunk_with_empty(tensor, num_chunks, dim), LazyChunks(tensor, num_chunks, dim)
    assert len(lazy) == len(expected)
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(lazy, expected, strict=True))
    assert lazy[-1].shape == expected[-1].shape


def test_fsdp2_uses_its_chunks_as_a_list():
    """FSDP2 would do something else with its chunks: forecasts of many ranks were slow, or wrong. Look at it again."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    uses = [line.strip() for line in inspect.getsource(_fsdp_param).splitlines() if "chunks" in line and "=" in line]
    assert [line for line in uses if line.startswith("chunks =")] == [
        "chunks = _chunk_with_empty(param_data, shard_world_size, dim=shard_dim)",
        "chunks = _chunk_with_empty(param_data, mesh_info.shard_mesh_size, dim=0)",
        "chunks = _chunk_with_empty(param_data, 1, dim=0)",
    ]
    assert {line for line in uses if not line.startswith("chunks =")} == {
        "sharded_param = chunks[shard_rank]",
        "padded_sharded_size = chunks[0].size()  # 0th always padded",
    }


TEXT = f"{models.__name__}:fsdp2"


def test_the_command_prints_and_says_what_must_shrink(capsys):
    """The table would not show where the peak is or what to do."""
    assert main(["forecast", TEXT, "--world-size", "8", "--ranks", "0,last", "--capacity", "1MiB"]) == 1
    text = capsys.readouterr().out
    assert "rank 7 cpu: peak" in text
    assert "backward of layers." in text
    assert "does not fit 1.00 MiB" in text
    assert "shard smaller modules each" in text


def test_the_commands_json(capsys):
    """Scripts could not read the forecast, or the exit status not say whether it fits."""
    assert main(["forecast", TEXT, "--world-size", "8", "--json", "--capacity", "1GiB"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"]
    assert data["shrink"] == []
    assert data["peak_bytes"] == sum(data["by_reftype"].values()) == sum(data["by_module"].values())


def test_the_command_finds_the_largest_batch(capsys, tmp_path):
    """The batch that is recommended would not be the largest that fits."""
    assert main(["forecast", TEXT, "--sweep", "batch=1,2", "--capacity", "100MiB", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    peaks = {point["value"]: point["peak_bytes"] for point in data["points"]}
    assert data["is_exact"]
    assert peaks[data["largest_fit"]] <= 100 << 20 < peaks[data["largest_fit"] + 1]
    assert main(["forecast", TEXT, "--save", str(tmp_path / "a.json"), "--set", "sequence=8"]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["arguments"] == {"sequence": 8}
