"""``install`` and ``Monitor``: one engine, its labelers, its record, for the life of a training run.

A step ends when the optimizer has stepped (the one passed in, else the first that trains the model), or when
``Monitor.step`` is called. At that moment, on the training thread, the engine's books are closed for the step (tens of
microseconds); everything else happens on the publisher's thread.

Invariants: nothing here raises into the training loop; ``close`` leaves every hook table, patched attribute and
allocator as before, and is safe to call twice; one Monitor at a time in a process. Where the engine cannot be built,
or the record's directory cannot be used, one warning says why and the job goes on with what still works.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchmem import __version__, config
from torchmem.errors import BuildError, InstallError, StoreError
from torchmem.model import REFTYPE_LABELS, Phase, RefType
from torchmem.wire import record as wire
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Self

RING_STEPS = 512
FACTS_INTERVAL_SECONDS = 1.0
_EMPTY_TOTALS = bytes(8 * len(RefType))

_current: Monitor | None = None
_install_lock = threading.Lock()


@dataclass(frozen=True)
class _Step:
    """One row of the ring."""

    number: int
    ended_at: float
    phases: int
    devices: dict[int, tuple[bytes, bytes]]
    """By device: totals by reftype at the peak and at the end, int64 little-endian."""


def install(model: nn.Module, optimizer: Optimizer | None = None, **settings: Any) -> Monitor:
    """Starts counting every byte that the training of ``model`` allocates, by module and reference type.

    Args:
        model: the root module, after parallelism was applied to it (``fully_shard``).
        optimizer: whose step ends a step; without it the first optimizer that trains the model does.
        **settings: see the README's table; each may also be given as ``TORCHMEM_<NAME>`` in the environment.

    Returns:
        The monitor; close it, or use it as a context manager.

    Raises:
        InstallError: the model is no module, the optimizer no optimizer, or a monitor is installed already.
        ConfigError: a setting cannot be used.
    """
    global _current  # noqa: PLW0603  # the allocator is the process's: so is its monitor
    chosen = config.load(settings)
    _check_arguments(model, optimizer)
    with _install_lock:
        if _current is not None:
            raise InstallError("torchmem is installed already in this process: close() that monitor first")
        _current = Monitor(model, optimizer, chosen)
        return _current


def _check_arguments(model: Any, optimizer: Any) -> None:
    from torch import nn
    from torch.optim import Optimizer

    if not isinstance(model, nn.Module):
        raise InstallError(f"the model is a {type(model).__name__}, not a torch.nn.Module: pass the root module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InstallError(
            f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass it or nothing"
        )


class Monitor:
    """Counts, names and publishes; made by ``install``."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, settings: config.Config) -> None:
        self.settings = settings
        self._closed = False
        self._native: Any = None
        self._labelers: list[Any] = []
        self._names: list[str] = []
        self._engine = "off"
        self._engine_failure = ""
        self._hook_seconds = 0.0
        self._step_number = 0
        self._step_seconds = 0.0
        self._own_seconds = 0.0
        self._ring: deque[_Step] = deque(maxlen=RING_STEPS)
        self._facts: list[Any] = []
        self._facts_at = 0.0
        self._rotated_at = time.monotonic()
        self._publisher: Publisher | None = None
        self._pid = os.getpid()
        self._step_began = time.perf_counter()
        try:
            if settings.enabled:
                self._start_engine(model, optimizer)
            self._identity = self._identify(model)
            if settings.enabled:
                self._start_publisher()
        except BaseException:
            self.close()  # half a monitor must not stay on the model
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(self) -> None:
        """Ends the step now, for loops without an optimizer or with a rule of their own."""
        began = time.perf_counter()
        self._try_end_step()
        self._own_seconds += time.perf_counter() - began

    def snapshot(self) -> wire.Record:
        """The current record: the books as of the end of the last step."""
        return self._record(final=self._closed)

    def close(self) -> None:
        """Stops counting, publishes the last record, puts everything back; safe to call twice."""
        global _current  # noqa: PLW0603  # as above
        with _install_lock:
            if self._closed or os.getpid() != self._pid:  # what a forked child holds is its parent's
                return
            self._closed = True
            if _current is self:
                _current = None
        if self._publisher is not None:
            self._publisher.close()
        self._stop_engine()

    # -- the engine

    def _start_engine(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        from torchmem.engine import native

        try:
            engine = native.load()
            engine.set_gate(False)
            if reason := engine.attach_cpu():
                raise BuildError(reason)
        except BuildError as error:
            self._engine_failure = str(error)
            warnings.warn(f"torchmem counts nothing: {error}", RuntimeWarning, stacklevel=4)
            return
        self._native = engine
        self._engine = "native"
        self._attach_labelers(model, optimizer)

    def _attach_labelers(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        from torchmem.engine.hook_cost import hook_seconds
        from torchmem.labelers.fsdp2 import Fsdp2Labeler, param_groups
        from torchmem.labelers.module import ModuleLabeler
        from torchmem.labelers.optimizer import OptimizerLabeler
        from torchmem.labelers.owners import OwnerTable

        engine = self._native
        owners = OwnerTable(model, self.settings.depth)
        self._names = owners.names
        engine.reset([0])
        self._hook_seconds = hook_seconds(engine)
        engine.reset(owners.parents)
        engine.set_gate(True)
        fsdp2 = Fsdp2Labeler(engine, owners, param_groups(model))
        optimizers = OptimizerLabeler(engine, owners, optimizer, self._try_end_step)
        modules = ModuleLabeler(
            engine,
            owners,
            lambda p: RefType.SHARDED_PARAMETER if fsdp2.is_sharded(p) else RefType.PARAMETER,
            optimizers.before_forward,
        )
        for labeler in (modules, fsdp2, optimizers):
            try:
                labeler.attach()
            except Exception as error:  # noqa: BLE001  # a torch that changed costs one labeler, not the job
                labeler.hooks.fail(error)
            self._labelers.append(labeler)
        self._end_step(time.perf_counter(), counts=False)

    def _stop_engine(self) -> None:
        for labeler in reversed(self._labelers):
            try:
                labeler.detach()
            except Exception as error:  # noqa: BLE001  # the rest must still be put back
                labeler.hooks.fail(error)
        if self._native is not None:
            self._native.set_gate(False)
            self._native.detach_cpu()

    def _lose_engine(self, reason: str) -> None:
        self._engine_failure = self._engine_failure or reason[:200]

    # -- the end of a step, on the training thread

    def _try_end_step(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._end_step(time.perf_counter())
        except Exception as error:  # noqa: BLE001  # nothing of ours may reach the training loop
            self._lose_engine(f"{type(error).__name__}: {error}")

    def _end_step(self, began: float, *, counts: bool = True) -> None:
        if self._native is not None:
            self._close_books(counts=counts)
        if counts:
            self._step_number += 1
            self._step_seconds += began - self._step_began
        self._step_began = began

    def _close_books(self, *, counts: bool) -> None:
        now = time.monotonic()
        if now - self._rotated_at >= self.settings.window:
            self._native.rotate_windows()
            self._rotated_at = now
        phases, rows = self._native.end_step()
        if counts:
            phases |= Phase.OPTIMIZER
            devices = {device: (at_peak, at_end) for device, _, _, at_peak, at_end in rows}
            self._ring.append(_Step(self._step_number + 1, time.time(), phases, devices))
        if now - self._facts_at >= FACTS_INTERVAL_SECONDS or len(self._facts) != len(rows):
            self._facts_at = now
            self._refresh_facts(rows)

    def _refresh_facts(self, rows: list[Any]) -> None:
        """Asks the devices now, while the books stand still: a remainder needs two counts of one moment."""
        import torch

        from torchmem.engine.reconcile import device_facts

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            self._native.attach_cuda()
        num_ooms = self._native.counters()["num_ooms"]
        self._facts = [device_facts(device, end, num_ooms) for device, _, end, _, _ in rows]

    # -- the record, on any thread

    def _identify(self, model: nn.Module) -> wire.Identity:
        import torch

        rank, local_rank, world_size = _ranks()
        return wire.Identity(
            train_job=self.settings.train_job,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            attempt=str(uuid.uuid4()),
            pid=os.getpid(),
            host=platform.node(),
            start_time=time.time(),
            engine=self._engine,
            torch_version=str(torch.__version__),
            torchmem_version=__version__,
            mesh=_mesh_coordinates(model),
        )

    def _record(self, *, final: bool) -> wire.Record:
        counters = self._native.counters() if self._native is not None else {}
        return wire.Record(
            identity=self._identity,
            clock=wire.Clock(
                step=self._step_number,
                step_seconds=self._step_seconds,
                tracker_seconds=self._tracker_seconds(counters),
                written_at=time.time(),
                final=final,
            ),
            modules=self._names,
            reftypes=list(REFTYPE_LABELS),
            devices=self._devices(),
            ring=_ring_columns(list(self._ring)),
            labelers=self._labeler_states(),
            counters=counters,
        )

    def _tracker_seconds(self, counters: dict[str, int]) -> float:
        """Events as sampled, module hooks as calibrated when installed, labels and the ends of steps as measured."""
        seconds = self._own_seconds
        for labeler in self._labelers:
            seconds += labeler.hooks.seconds
        if counters:
            seconds += counters["event_nanoseconds"] / 1e9 + counters["num_hook_calls"] * self._hook_seconds
        return seconds

    def _devices(self) -> list[wire.Device]:
        if self._native is None:
            return []
        return [
            wire.Device(
                name=facts.name,
                usage=usage,
                step_peak=step_peak,
                active_peak=active_peak,
                usage_bytes=usage_bytes,
                step_peak_bytes=step_peak_bytes,
                peak_bytes=peak_bytes,
                unattributed_bytes=facts.unattributed_bytes,
                limit_bytes=facts.limit_bytes,
                other_bytes=facts.other_bytes,
                model=facts.model,
                uuid=facts.uuid,
                allocator=facts.allocator,
            )
            for facts, (_, usage_bytes, step_peak_bytes, peak_bytes, usage, step_peak, active_peak) in zip(
                self._facts, self._native.read_window(), strict=False
            )
        ]

    def _labeler_states(self) -> list[wire.Labeler]:
        states = [
            wire.Labeler(name=labeler.name, up=not labeler.hooks.failure, reason=labeler.hooks.failure)
            for labeler in self._labelers
        ]
        return [wire.Labeler(name="engine", up=not self._engine_failure, reason=self._engine_failure), *states]

    def _start_publisher(self) -> None:
        try:
            store = RankStore(self.settings.dir, self.settings.train_job, self._identity.rank)
        except StoreError as error:
            warnings.warn(f"torchmem publishes nothing: {error}", RuntimeWarning, stacklevel=4)
            return
        self._publisher = Publisher(
            store, lambda final: wire.encode(self._record(final=final)), self.settings.publish_interval
        )
        self._publisher.start()


def _ring_columns(steps: list[_Step]) -> wire.Ring:
    import array

    devices = sorted({device for step in steps for device in step.devices})
    empty = (_EMPTY_TOTALS, _EMPTY_TOTALS)
    return wire.Ring(
        steps=array.array("q", [step.number for step in steps]).tobytes(),
        ended_at=array.array("d", [step.ended_at for step in steps]).tobytes(),
        phases=array.array("q", [step.phases for step in steps]).tobytes(),
        devices=[
            wire.RingDevice(
                name="cpu" if device == 0 else f"cuda:{device - 1}",
                step_peak=b"".join(step.devices.get(device, empty)[0] for step in steps),
                step_end=b"".join(step.devices.get(device, empty)[1] for step in steps),
            )
            for device in devices
        ],
    )


def _ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size), from torch.distributed, else the launcher's environment, else a lone process."""
    import torch.distributed as dist

    def number(name: str, default: int) -> int:
        value = os.environ.get(name, "")
        return int(value) if value.isdecimal() else default

    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    return rank, number("LOCAL_RANK", rank), world_size


def _mesh_coordinates(model: nn.Module) -> dict[str, int]:
    """This rank's place along each named dimension of the mesh that the model's parameters lie on."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        names: Callable[..., Any] | None = getattr(mesh, "mesh_dim_names", None)
        if names:
            coordinate = mesh.get_coordinate()  # type: ignore[union-attr]  # a mesh, as it has names
            return {} if coordinate is None else dict(zip(names, coordinate, strict=True))  # type: ignore[call-overload]  # as above
    return {}
