"""Runs the user's own model on fake tensors, as one rank of a job of any size, and reads off what it would hold.

The function that is given makes the model, its optimizer and a step to call. It runs with every tensor fake: shapes,
types and lifetimes are real, memory is not taken. Two steps are run: in the first the optimizer makes its state, and
the second is what every later one is like.

Invariants: nothing of the process is changed when it returns or raises; no memory of the job's size is taken.

Limits: as of ``engine.dispatch`` (what kernels use inside is not seen) and ``engine.fake`` (values are not known, so
neither are shapes that depend on them). What is compiled is forecast as it runs eagerly. On the CPU with the ``cuda``
allocator optimizers choose as on CUDA, but attention is the CPU's: what its kernels keep differs by a small share.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import operator
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import fake_tensor

from torchmem import __version__
from torchmem.counting import Counting, check_arguments, claim, release
from torchmem.engine.dispatch import DispatchEngine
from torchmem.engine.dispatch_storages import device_id
from torchmem.engine.fake import FakeJob, fake_job
from torchmem.engine.reconcile import device_name
from torchmem.engine.rounding import CachingAllocator, block_bytes
from torchmem.errors import ForecastError, InstallError
from torchmem.forecasting.outcome import Cell, DeviceForecast, Forecast, Place, Plain, RankForecast, StepForecast
from torchmem.model import REFTYPE_LABELS

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchmem.engine.fast_ledger import FastBooks

Build = Callable[..., "tuple[nn.Module, Optimizer | None, Callable[[], Any]]"]

STEPS = ("first", "steady")
ALLOCATORS = ("exact", "cuda")
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)
_SAVING = (str(Path(_TORCH, "serialization.py")), str(Path(_TORCH, "distributed", "checkpoint")))


def forecast(
    function: Build,
    *,
    world_size: int = 1,
    ranks: Iterable[int] = (0,),
    mesh: Mapping[str, int] | None = None,
    device: str = "cpu",
    allocator: str | None = None,
    depth: int = 2,
    arguments: Mapping[str, Plain] | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> Forecast:
    """What a training job will hold, by device, module and reference type, without running it.

    Args:
        function: returns the model, its optimizer (or None) and a step to call. It is given ``mesh``, ``device``,
            ``rank`` and ``world_size`` where it has such parameters, and the arguments.
        world_size: ranks of the job.
        ranks: those to forecast.
        mesh: dimensions of a device mesh by name, outermost first; their product is the world size.
        device: ``cpu`` or ``cuda``: the device to forecast for.
        allocator: ``exact``, sizes as requested, or ``cuda``, as its caching allocator rounds them; by default that of
            the device.
        depth: how deep modules are told apart.
        arguments: further keywords for the function.
        on_stage: called with the name of each stage that begins, for showing progress.

    Raises:
        ForecastError: the job does what fake tensors cannot, or arguments do not fit together.
        InstallError: torchmem watches this process already, or the function returns something else.
    """
    ranks = _whole_numbers(ranks)
    allocator = allocator or ("cuda" if device == "cuda" else "exact")
    _check(world_size, ranks, mesh, device, allocator)
    given = dict(arguments or {})
    forecasts = []
    for rank in ranks:
        run = _Run(function, world_size, rank, dict(mesh or {}), device, allocator, depth, given, on_stage or _silent)
        forecasts.append(run.run())
        gc.collect()  # the job is full of cycles, and may be followed by another
    return Forecast(
        ranks=forecasts,
        function=f"{function.__module__}:{getattr(function, '__qualname__', function)}",
        arguments=given,
        world_size=world_size,
        mesh=dict(mesh or {}),
        device=device,
        allocator=allocator,
        torch_version=str(torch.__version__),
        torchmem_version=__version__,
    )


def _whole_numbers(ranks: Iterable[int]) -> list[int]:
    try:
        return sorted({operator.index(rank) for rank in ranks})
    except TypeError:
        raise ForecastError(f"ranks {ranks!r}: give whole numbers, such as (0, 7)") from None


def _check(world_size: int, ranks: Sequence[int], mesh: Mapping[str, int] | None, device: str, allocator: str) -> None:
    if world_size < 1:
        raise ForecastError(f"a job of {world_size} ranks: give at least 1")
    if not ranks or ranks[0] < 0 or ranks[-1] >= world_size:
        raise ForecastError(f"ranks {', '.join(map(str, ranks))} of {world_size}: give some of 0 to {world_size - 1}")
    if mesh:
        size = 1
        for length in mesh.values():
            size *= length
        if size != world_size:
            shape = " x ".join(f"{name}={length}" for name, length in mesh.items())
            raise ForecastError(f"a mesh of {shape} has {size} ranks, the job {world_size}: make them equal")
    if device not in {"cpu", "cuda"}:
        raise ForecastError(f"device {device!r}: choose cpu or cuda")
    if allocator not in ALLOCATORS:
        raise ForecastError(f"allocator {allocator!r}: choose one of {', '.join(ALLOCATORS)}")
    if device == "cuda" and (reason := no_fake_cuda()):
        raise ForecastError(
            f"torch {torch.__version__} cannot train on fake cuda tensors ({reason}): forecast on the cpu device with"
            " the cuda allocator's rounding instead (device='cpu', allocator='cuda'; --device cpu --allocator cuda)"
        )


def no_fake_cuda() -> str:
    """Why this torch cannot differentiate fake cuda tensors; empty where it can.

    Autograd asks the device for its stream whenever it meets a tensor, a fake one too, and ends the process where
    there is none to ask: so this must not be tried out.
    """
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch's
        return "it was built without CUDA"
    return "" if torch.cuda.is_available() else "it finds no CUDA device"


class _Run:
    """One rank."""

    def __init__(
        self,
        function: Build,
        world_size: int,
        rank: int,
        mesh: dict[str, int],
        device: str,
        allocator: str,
        depth: int,
        arguments: dict[str, Plain],
        on_stage: Callable[[str], None],
    ) -> None:
        self._function = function
        self._world_size = world_size
        self._rank = rank
        self._mesh = mesh
        self._device = device
        self._depth = depth
        self._arguments = arguments
        self._on_stage = on_stage
        self._pool = CachingAllocator() if allocator == "cuda" else None
        main = device_id(torch.device(device)) or 0
        self._main = main
        self._engine = DispatchEngine(block_bytes if self._pool else None, default_device=main)
        self._engine.on_block = self._on_block if self._pool else None
        self._construction: dict[int, int] = {}
        self._steps: dict[int, list[StepForecast]] = {}
        self._reserved: dict[int, int] = {}
        self._notes: list[str] = []

    def run(self) -> RankForecast:
        """Builds, steps twice, and reads the books after each."""
        began = time.perf_counter()
        claim(self, "leave its block, or close() it, before you forecast")
        try:
            like_cuda = self._pool is not None and self._device == "cpu"
            with (
                fake_job(self._engine, self._world_size, self._rank, like_cuda=like_cuda) as job,
                _quiet(),
                _explained(),
            ):
                self._in_job(job)
            self._note_limits(job)
        finally:
            release(self)
        devices = [self._device_forecast(device) for device in sorted(self._steps, key=self._order)]
        return RankForecast(self._rank, devices, self._notes, time.perf_counter() - began)

    def _in_job(self, job: FakeJob) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(job.mode)
            self._engine.start()
            stack.callback(self._engine.stop)
            self._on_stage("construction")
            model, optimizer, step = self._built()
            counting = Counting(model, optimizer, depth=self._depth, engine=self._engine)
            stack.callback(counting.detach)
            counting.attach()
            self._construction = {device: books.life_peak for device, books in self._engine.all_books().items()}
            self._engine.end_step()
            for name in STEPS:
                self._on_stage(f"{name} step")
                step()
                counting.label_now()
                self._read_step(name, counting.owners.names)
            if any(_is_compiled(module) for module in model.modules()):
                self._notes.append("compiled modules are forecast as they run eagerly, which holds more")
            failed = {one.name: one.hooks.failure for one in counting.labelers if one.hooks.failure}
            self._notes += [f"labeler {name} is off: {reason}" for name, reason in failed.items()]

    def _built(self) -> tuple[nn.Module, Optimizer | None, Callable[[], Any]]:
        made: Any = self._function(**self._keywords())
        if not isinstance(made, tuple) or len(made) != 3 or not callable(made[2]):  # noqa: PLR2004  # as documented
            raise InstallError(f"{self._name} must return (model, optimizer or None, step), not {type(made).__name__}")
        check_arguments(made[0], made[1])
        return made

    @property
    def _name(self) -> str:
        return getattr(self._function, "__name__", "the function")

    def _keywords(self) -> dict[str, Any]:
        try:
            parameters = inspect.signature(self._function).parameters
        except (TypeError, ValueError):
            return dict(self._arguments)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if unknown := [name for name in self._arguments if name not in parameters and not takes_any]:
            raise ForecastError(
                f"{self._name}() takes no {', '.join(unknown)}: it has {', '.join(parameters) or 'none'}"
            )
        offered: dict[str, Callable[[], Any]] = {
            "mesh": self._make_mesh,
            "device": lambda: torch.device(self._device),
            "rank": lambda: self._rank,
            "world_size": lambda: self._world_size,
        }
        return {name: make() for name, make in offered.items() if name in parameters} | self._arguments

    def _make_mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = self._mesh or {"ranks": self._world_size}
        return init_device_mesh(self._device, tuple(mesh.values()), mesh_dim_names=tuple(mesh))

    def _read_step(self, name: str, owners: list[str]) -> None:
        places = dict(self._engine.peak_places)
        books = self._engine.all_books()
        for device, one in books.items():
            place = places.get(device)
            at = Place() if place is None else Place(_phase(place.phase), owners[place.owner], str(place.operator))
            cells = _cells(one, owners)
            self._steps.setdefault(device, []).append(StepForecast(name, one.peak, one.current, at, cells))
        if self._pool is not None:
            self._reserved = self._pool.peaks()
        self._engine.end_step()

    def _on_block(self, device: int, key: int, num_bytes: int) -> None:
        if self._pool is not None and device == self._main:
            (self._pool.allocate if num_bytes > 0 else self._pool.free)(device, key, abs(num_bytes))

    def _note_limits(self, job: FakeJob) -> None:
        if job.num_values_read:
            self._notes.append(
                f"the job read {job.num_values_read} values of tensors, which fake tensors do not have: each was 0"
            )
        self._notes += job.made_up
        self._notes += [f"{what} is as torch has it: {reason}" for what, reason in job.unadapted.items()]

    def _order(self, device: int) -> tuple[bool, int]:
        return device != self._main, device

    def _device_forecast(self, device: int) -> DeviceForecast:
        return DeviceForecast(
            "cuda:0" if device == 1 else device_name(device),
            self._construction.get(device, 0),
            self._steps[device],
            self._reserved.get(device),
        )


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001  # there is no public way


def _cells(books: FastBooks, owners: list[str]) -> list[Cell]:
    held = [(owner, reftype, num_bytes) for (owner, reftype), num_bytes in books.at_peak().items() if num_bytes]
    cells = [Cell(owners[owner], REFTYPE_LABELS[reftype], num_bytes) for owner, reftype, num_bytes in held]
    return sorted(cells, key=lambda cell: (-cell.num_bytes, cell.module, cell.reftype))


def _phase(phase: Any) -> str:
    return str(phase.name or "other").lower()


def _silent(_stage: str) -> None:
    """Nobody watches."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a fake tensor has no address: labelers ask for it, and are told 0."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What the job raises because its tensors are fake says so."""
    try:
        yield
    except InstallError:
        raise
    except Exception as error:
        if _is_saving(error):
            raise ForecastError(
                f"{_where(error)}: the job saves or loads tensors, and fake ones have no values to write or to read:"
                f" leave that out of what is forecast ({_reason(error)})"
            ) from error
        if isinstance(error, ForecastError) and not _own_lines(error):
            raise
        raise ForecastError(f"{_where(error)}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ForecastError):
        return str(error)
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return f"the shape of what {error.func} returns depends on values, which fake tensors do not have"
    if isinstance(error, fake_tensor.DataDependentOutputException | fake_tensor.UnsupportedOperatorException):
        return f"fake tensors cannot do {error.func}: leave it out of the step"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_saving(error: Exception) -> bool:
    if isinstance(error, OSError):  # a file that is not there says so itself
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.filename.startswith(_SAVING) for frame in frames)


def _where(error: BaseException) -> str:
    """The innermost line of the job's own."""
    own = _own_lines(error)
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "in torch"


def _own_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """The job's own lines on the way to it, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith((_TORCH, _OWN, "<"))]
