"""The table of rows: every way people train, one line each.

Invariants: names are unique, lower case and slash-separated, from the general to the special; making a row allocates
nothing and starts nothing, only ``build`` does.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchmem.engine import build as builder
from torchmem.errors import BuildError
from torchmem.validation import parallel, saving
from torchmem.validation.models import (
    ACROSS_DEVICES,
    DECODER,
    EXPERT_PER_RANK,
    MLP_STACK,
    MLPS,
    NESTED,
    ZOO,
    Sample,
    mlps,
)
from torchmem.validation.workloads import Build

COMPILE_SECONDS = 300.0
"""How long a compiled row may take: the compiler's time on a slow host, once per cache."""


class Machine(NamedTuple):
    """What rows run on."""

    device_type: str
    """``cpu`` or ``cuda``."""
    num_ranks: int
    remark: str = ""
    """Where it is not what was asked for: why; one line."""


def _able(_machine: Machine) -> str:
    return ""


@dataclass(frozen=True)
class Row:
    """One workload to validate.

    Attributes:
        name: what it is called.
        build: makes the workload on one rank.
        min_ranks: how many ranks it takes at least; rows that take two dimensions of ranks need an even number.
        unable: why it cannot run on a machine; empty where it can.
        seconds: after how long it counts as hanging, once everything is imported.
    """

    name: str
    build: Build
    min_ranks: int = 1
    unable: Callable[[Machine], str] = _able
    seconds: float = 60.0

    def reason_to_skip(self, machine: Machine) -> str:
        """Why the row cannot run on this machine, one line; empty where it can."""
        if machine.num_ranks < self.min_ranks:
            return f"needs {self.min_ranks} ranks, there is {machine.num_ranks}"
        if self.min_ranks > 1 and machine.num_ranks % self.min_ranks:
            return f"needs a multiple of {self.min_ranks} ranks, there are {machine.num_ranks}"
        return self.unable(machine)


def find(patterns: Sequence[str], rows: Sequence[Row] | None = None) -> list[Row]:
    """The rows that one of the patterns names; all where there is none.

    A pattern with ``*`` or ``?`` matches whole names; any other is a name, or a part of names where it is none.
    """
    chosen = ROWS if rows is None else rows
    names = {row.name for row in chosen}
    globs = [p if p in names or set(p) & set("*?[") else f"*{p}*" for p in patterns]
    return [row for row in chosen if not globs or any(fnmatch.fnmatchcase(row.name, glob) for glob in globs)]


def _needs_numpy(_machine: Machine) -> str:
    missing = importlib.util.find_spec("numpy") is None
    return "torch needs numpy to send objects between ranks, and it is not installed" if missing else ""


def _needs_two_devices(machine: Machine) -> str:
    return "there is one device" if machine.device_type == "cpu" else ""


def _needs_accelerator(machine: Machine) -> str:
    return "FSDP1 offloads to the host from an accelerator only" if machine.device_type == "cpu" else ""


def _needs_compiler(machine: Machine) -> str:
    if machine.device_type == "cuda":
        return "" if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"
    try:
        builder.compiler()
    except BuildError as error:
        return str(error)
    return ""


def _multi_group() -> Iterator[Row]:
    choices = itertools.product(("reshard", "keep"), ("device", "offload"), ("full", "mixed"))
    for reshard, offload, mixed in choices:
        build = parallel.fsdp2(
            MLPS,
            reshard=reshard == "reshard",
            offload=offload == "offload",
            mixed=torch.bfloat16 if mixed == "mixed" else None,
        )
        yield Row(f"fsdp2/multi-group/{reshard}/{offload}/{mixed}", build)


def _recomputing() -> Iterator[Row]:
    for kind, use_reentrant in (("reentrant", True), ("non-reentrant", False)):
        yield Row(f"plain/checkpointing/{kind}", parallel.recomputing(DECODER, use_reentrant=use_reentrant))
    for kind, reshard in itertools.product(("composable", "wrapper"), ("reshard", "keep")):
        build = parallel.fsdp2(DECODER, recompute=kind, reshard=reshard == "reshard")
        yield Row(f"fsdp2/checkpointing/{kind}/{reshard}", build)


def _zoo() -> Iterator[Row]:
    styles: dict[str, Callable[[Sample], Build]] = {
        "plain": parallel.plain,
        "ddp": parallel.ddp,
        "fsdp1": lambda sample: parallel.fsdp1(sample, use_orig_params=True),
        "fsdp2": parallel.fsdp2,
    }
    for name, sample in ZOO.items():
        for style, build in styles.items():
            yield Row(f"zoo/{name}/{style}", build(sample))


def _fsdp1() -> Iterator[Row]:
    for orig in (False, True):
        kind = "orig" if orig else "flat"
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            name = strategy.strip("_").lower().replace("_", "-")
            build = parallel.fsdp1(DECODER, strategy=strategy, use_orig_params=orig)
            yield Row(f"fsdp1/{name}/{kind}", build, _ranks_of(strategy))
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            name = strategy.lower().replace("_", "-")
            build = parallel.fsdp1(DECODER, strategy=strategy, mixed=True, use_orig_params=orig)
            yield Row(f"fsdp1/mixed/{name}/{kind}", build, _ranks_of(strategy))
        offload = parallel.fsdp1(DECODER, offload=True, use_orig_params=orig)
        yield Row(f"fsdp1/offload/{kind}", offload, unable=_needs_accelerator)
        yield Row(f"fsdp1/ignored-modules/{kind}", parallel.fsdp1(MLPS, ignored="1", use_orig_params=orig), 2)
        yield Row(f"fsdp1/no-sync/{kind}", parallel.fsdp1(DECODER, accumulate=True, use_orig_params=orig), 2)


def _ranks_of(strategy: str) -> int:
    """A lone rank has nothing to shard: torch makes any strategy NO_SHARD there, and the row would show nothing."""
    return 1 if strategy == "NO_SHARD" else 2


def _states() -> Iterator[Row]:
    yield Row("state-dict/plain", saving.plain(DECODER))
    yield Row("state-dict/ddp", saving.ddp(DECODER))
    for orig in (False, True):
        kind = "orig" if orig else "flat"
        for what in ("full", "sharded"):
            build = saving.fsdp1(DECODER, kind=f"{what.upper()}_STATE_DICT", use_orig_params=orig)
            yield Row(f"state-dict/fsdp1/{what}/{kind}", build, 2)
        build = saving.fsdp1(DECODER, kind="FULL_STATE_DICT", rank0_only=True, use_orig_params=orig)
        yield Row(f"state-dict/fsdp1/rank0-only/{kind}", build, 2)
    # torch cannot load a local state dict into original parameters.
    yield Row("state-dict/fsdp1/local/flat", saving.fsdp1(DECODER, kind="LOCAL_STATE_DICT"), 2, _needs_numpy)
    yield Row("state-dict/fsdp2/distributed", saving.distributed(MLPS), unable=_needs_numpy)
    yield Row("state-dict/fsdp2/distributed-async", saving.distributed(MLPS, is_async=True), unable=_needs_numpy)
    yield Row("state-dict/fsdp2/full", saving.distributed(MLPS, full=True), unable=_needs_numpy)


def _compiled() -> Iterator[Row]:
    sample = Sample(lambda: mlps(num=2), units=MLPS.units)
    for what in ("model", "units", "optimizer"):
        build = parallel.compiled(sample, what=what)
        yield Row(f"compiled/{what}", build, unable=_needs_compiler, seconds=COMPILE_SECONDS)
    build = parallel.fsdp2(sample, compiled=True)
    yield Row("compiled/fsdp2", build, unable=_needs_compiler, seconds=COMPILE_SECONDS)


ROWS: tuple[Row, ...] = (
    *_multi_group(),
    Row("fsdp2/non-root", parallel.fsdp2_part(MLPS)),
    *_recomputing(),
    Row("plain/two-devices", parallel.across_devices(ACROSS_DEVICES, on_host="first"), unable=_needs_two_devices),
    Row("fsdp2/hybrid/reshard", parallel.fsdp2(DECODER, hybrid=True), min_ranks=2),
    Row("fsdp2/hybrid/keep", parallel.fsdp2(DECODER, hybrid=True, reshard=False), min_ranks=2),
    Row("fsdp2/hybrid/mixed", parallel.fsdp2(DECODER, hybrid=True, mixed=torch.bfloat16), min_ranks=2),
    Row("fsdp2/accumulate/sync", parallel.fsdp2(MLPS, accumulate="sync")),
    Row("fsdp2/accumulate/no-sync", parallel.fsdp2(MLPS, accumulate="no-sync")),
    Row("fsdp2/accumulate/no-sync/mixed", parallel.fsdp2(MLPS, accumulate="no-sync", mixed=torch.bfloat16)),
    Row("fsdp2/expert-per-rank", parallel.fsdp2(EXPERT_PER_RANK, solo="expert")),
    Row("tensor-parallel/columns-rows", parallel.tensor_parallel(), min_ranks=2),
    Row("tensor-parallel/sequence", parallel.tensor_parallel(sequence=True), min_ranks=2),
    Row("tensor-parallel/fsdp2", parallel.tensor_parallel(sharded=True), min_ranks=2),
    Row("tensor-parallel/fsdp2/sequence", parallel.tensor_parallel(sharded=True, sequence=True), min_ranks=2),
    Row("tensor-parallel/fsdp2/checkpointing", parallel.tensor_parallel(sharded=True, recompute=True), min_ranks=2),
    *_zoo(),
    Row("ddp/copied", parallel.ddp(DECODER, gradient_as_bucket_view=False)),
    Row("ddp/bucket-view", parallel.ddp(DECODER, gradient_as_bucket_view=True)),
    Row("ddp/no-sync/copied", parallel.ddp(MLP_STACK, accumulate=True)),
    Row("ddp/no-sync/bucket-view", parallel.ddp(MLP_STACK, accumulate=True, gradient_as_bucket_view=True)),
    Row("ddp/static-graph", parallel.ddp(DECODER, static_graph=True)),
    Row("ddp/unused-parameters", parallel.ddp(ZOO["unused-module"], gradient_as_bucket_view=True)),
    *_fsdp1(),
    Row("fsdp1/expert-per-rank", parallel.fsdp1(EXPERT_PER_RANK, solo="expert", use_orig_params=True)),
    Row("fsdp1/nested/flat", parallel.fsdp1(NESTED, use_orig_params=False)),
    *_states(),
    *_compiled(),
)
"""In the order in which they run."""
