"""``install`` and ``Monitor``: one engine, its labelers, its record, for the life of a training run.

A step ends when the optimizer has stepped (the one passed in, else the first that trains the model); once
``Monitor.step`` has been called, only when it is called again. At that moment, on the training thread, the engine's
books are closed for the step (tens of microseconds); everything else happens on the publisher's thread.

Invariants: nothing here raises into the training loop; ``close`` leaves every hook table, patched attribute and
allocator as before, and is safe to call twice; one Monitor at a time in a process. Where the engine cannot be built,
one step in so many is sampled by another (see ``sampling``); where that cannot be either, or the record's directory
cannot be used, the job goes on with what still works; one warning says why.

Known limit: a failed allocation is in the next record, within ``publish_interval``, and in the one at the end; with a
process that is killed before that it is lost.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torchmem import config
from torchmem.counting import MAX_FORWARDS_IN_STEP, Counting, check_arguments, claim, release, slot_lock
from torchmem.errors import BuildError, InstallError, StoreError
from torchmem.labelers.hooks import is_from_signal_handler
from torchmem.model import REFTYPE_LABELS, Phase
from torchmem.recorder import Step, device_books, held_forecast, identify, oom_events, ring_columns
from torchmem.wire import record as wire
from torchmem.wire.publisher import Publisher
from torchmem.wire.store import RankStore

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from typing_extensions import Self

    from torchmem.forecasting.held import Held
    from torchmem.sampling.sampler import StepSampler

RING_STEPS = 512
FACTS_INTERVAL_SECONDS = 1.0
MAX_INPUT_SIZE = (1 << 63) - 1
NO_STEP = (
    f"no step has ended in {MAX_FORWARDS_IN_STEP} forwards: pass the optimizer to install(), or call monitor.step()"
)

logger = logging.getLogger("torchmem")


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
    chosen = config.load(settings)
    check_arguments(model, optimizer)
    with slot_lock:  # an install that fails closes what it began
        return Monitor(model, optimizer, chosen)


class Monitor:
    """Counts, names and publishes; made by ``install``."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, settings: config.Config) -> None:
        self.settings = settings
        self._closed = False
        self._counting: Counting | StepSampler | None = None
        self._sampler: StepSampler | None = None
        self._names: list[str] = []
        self._engine = "off"
        self._engine_failure = ""
        self._engine_remark = ""
        self._cuda_failure = ""
        self._step_number = 0
        self._step_seconds = 0.0
        self._num_forwards = 0
        self._input_size = 0
        self._own_seconds = 0.0
        self._ring: deque[Step] = deque(maxlen=RING_STEPS)
        self._facts: list[Any] = []
        self._facts_at = 0.0
        self._known_ooms: tuple[int, dict[int, int], list[wire.OutOfMemory]] = (0, {}, [])
        self._rotated_at = time.monotonic()
        self._publisher: Publisher | None = None
        self._identity: wire.Identity | None = None
        self._forecast: Held | None = None
        self._last: wire.Record | None = None
        self._by_hand = False
        self._phases = 0
        self.pid = os.getpid()
        self._step_began = time.perf_counter()
        claim(self, "close() that monitor first")
        try:
            if settings.enabled:
                self._start_engine(model, optimizer)
            every = 1 if self._sampler is None else settings.sample_every
            self._identity = identify(self.settings.train_job, self._engine, model, every)
            if settings.enabled:
                self._hold_against_forecast(self._identity, model)
                self._start_publisher(self._identity.rank)
        except BaseException:
            self.close()  # half a monitor must not stay on the model
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Ctrl-C is how people end a run; any other exception is a crash, which the last record must not deny.
        self._close(is_clean=error is None or isinstance(error, KeyboardInterrupt))

    def step(self, tokens: int | None = None) -> None:
        """Ends the step now; from the first call on the optimizer no longer does.

        For loops without an optimizer, or with a rule of their own.

        Args:
            tokens: how large the step's input was, in any unit of the job's; by default the number of elements of the
                largest inputs that the model was called with. Where lengths vary, so does memory: knowing by how much
                tells a leak from a long batch.
        """
        began = time.perf_counter()
        self._by_hand = True
        if tokens is not None:
            self._input_size = _whole(tokens)
        if os.getpid() != self.pid:  # a forked child's copy
            return
        if self._counting is not None:
            self._counting.label_now()
        self._try_end_step()
        self._own_seconds += time.perf_counter() - began

    def snapshot(self) -> wire.Record:
        """The current record: the books as of the end of the last step; after ``close``, the last one."""
        return self._last or self._record(final=False)

    def close(self) -> None:
        """Stops counting, publishes the last record, puts everything back; safe to call twice."""
        self._close(is_clean=True)

    def _close(self, *, is_clean: bool) -> None:
        if os.getpid() != self.pid:  # what a forked child holds is its parent's, the lock perhaps too
            return
        with slot_lock:
            if self._closed:
                return
            self._closed = True
        try:
            if self._publisher is not None:
                self._publisher.close(is_clean=is_clean)
            if self._identity is not None:
                self._last = self._record(final=is_clean)
        finally:  # also on a Ctrl-C meanwhile
            self._stop_engine()
            release(self)  # last: whoever counts next must find torch as it was

    # -- the engine

    def _start_engine(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        if self.settings.engine == config.DISPATCH:
            self._engine_remark = f"one step in {self.settings.sample_every} is counted, as the settings say"
            self._start_sampler(model, optimizer, "")
            return
        counting = Counting(
            model,
            optimizer,
            depth=self.settings.depth,
            on_step=self._after_optimizer_step,
            before_forward=self._before_forward,
        )
        try:
            self._counting = counting  # first: when this is interrupted, close() takes off what is on
            counting.attach()
        except BuildError as error:
            self._start_sampler(model, optimizer, str(error))
            return
        self._engine = config.NATIVE
        self._names = counting.owners.names
        self._end_step(time.perf_counter(), counts=False)

    def _start_sampler(self, model: nn.Module, optimizer: Optimizer | None, native_failure: str) -> None:
        """Samples instead, because of that failure, or because it is wished."""
        every = self.settings.sample_every
        self._engine_failure = native_failure and f"one step in {every} is counted: {native_failure}"
        try:
            from torchmem.sampling.sampler import StepSampler

            self._sampler = self._counting = StepSampler(
                model,
                optimizer,
                depth=self.settings.depth,
                every=every,
                on_step=self._after_optimizer_step,
                before_forward=self._before_forward,
            )
            self._sampler.attach()
        except Exception as error:  # noqa: BLE001  # a torch that has changed
            self._engine_failure = native_failure or f"{type(error).__name__}: {error}"
            self._stop_engine()
            self._sampler = self._counting = None
            warnings.warn(f"torchmem counts nothing: {self._engine_failure}", RuntimeWarning, stacklevel=5)
            return
        self._engine = config.DISPATCH
        self._names = self._sampler.owners.names
        if native_failure:
            warnings.warn(f"torchmem counts only one step in {every}: {native_failure}", RuntimeWarning, stacklevel=5)

    def _stop_engine(self) -> None:
        if self._counting is not None:
            self._counting.detach()

    @property
    def _native(self) -> Any:
        """The engine, once it counts."""
        return self._counting.native if self._counting is not None and self._names else None

    @property
    def _labelers(self) -> list[Any]:
        return [] if self._counting is None else self._counting.labelers

    def _lose_engine(self, reason: str) -> None:
        self._engine_failure = self._engine_failure or reason[:200]

    # -- the end of a step, on the training thread

    def _after_optimizer_step(self) -> None:
        self._phases |= Phase.OPTIMIZER
        if not self._by_hand:
            self._try_end_step()

    def _try_end_step(self) -> None:
        if self._closed or os.getpid() != self.pid:
            return
        try:
            self._end_step(time.perf_counter())
        except Exception as error:  # nothing of ours may reach the training loop
            if is_from_signal_handler(error):
                raise
            self._lose_engine(f"{type(error).__name__}: {error}")

    def _end_step(self, began: float, *, counts: bool = True) -> None:
        if counts:
            self._step_number += 1
            self._step_seconds += began - self._step_began
        self._step_began = began
        self._num_forwards = 0
        if self._native is not None:
            self._close_books(counts=counts)

    def _before_forward(self, num_elements: int) -> None:
        self._num_forwards += 1
        self._input_size = max(self._input_size, min(num_elements, MAX_INPUT_SIZE))
        if self._num_forwards == MAX_FORWARDS_IN_STEP:
            logger.warning("%s: nothing new is published", NO_STEP)

    def _close_books(self, *, counts: bool) -> None:
        now = time.monotonic()
        if now - self._rotated_at >= self.settings.window:
            self._native.rotate_windows()
            self._rotated_at = now
        is_counted = counts and (self._sampler is None or self._sampler.end_step())
        phases, rows = self._native.end_step()
        if is_counted:
            devices = {device: (at_peak, at_end) for device, _, _, at_peak, at_end in rows}
            phases |= self._phases
            self._ring.append(Step(self._step_number, time.time(), phases, self._input_size, devices))
        self._phases = self._input_size = 0
        if now - self._facts_at >= FACTS_INTERVAL_SECONDS or len(self._facts) != len(rows):
            self._facts_at = now
            self._refresh_facts(rows)

    def _refresh_facts(self, rows: list[Any]) -> None:
        """Asks the devices now, while the books stand still: a remainder needs two counts of one moment."""
        import torch

        from torchmem.engine.reconcile import DeviceFacts, device_facts, device_name

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            self._cuda_failure = self._native.attach_cuda()[:200]
        try:
            self._facts = [
                device_facts(device, end, lambda device=device: self._ooms()[0].get(device, 0))  # type: ignore[misc]  # a default binds it
                for device, _, end, _, _ in rows
            ]
        except Exception as error:  # a driver that will not answer costs its figures, not the books
            if is_from_signal_handler(error):
                raise
            self._lose_engine(f"device statistics: {type(error).__name__}: {error}")
            self._facts = [DeviceFacts(name=device_name(device)) for device, *_ in rows]

    # -- the record, on any thread

    def _record(self, *, final: bool) -> wire.Record:
        if self._identity is None:
            raise InstallError("the monitor was never installed: install() failed")
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
            devices=[] if self._native is None else self._device_books(),
            ring=ring_columns(list(self._ring)),
            labelers=self._labeler_states(),
            oom_events=[] if self._native is None else self._ooms()[1],
            counters={**counters, "num_failed_writes": self._publisher.num_failed if self._publisher else 0},
        )

    def _device_books(self) -> list[wire.Device]:
        windows, peaks = self._native.read_window(), self._native.checkpoint_peaks()
        return device_books(self._facts, windows, peaks, self._ooms()[0], self._forecast)

    def _ooms(self) -> tuple[dict[int, int], list[wire.OutOfMemory]]:
        """Failed allocations: how many by device, and the last; taken out of the engine when there is a new one."""
        num_known, by_device, events = self._known_ooms
        if self._native.counters()["num_ooms"] != num_known:
            counts, last = self._native.ooms()
            by_device = dict(counts)
            events = oom_events(last, num_steps_before=1)  # install() ended a step that was none of the job's
            self._known_ooms = (sum(by_device.values()), by_device, events)
        return by_device, events

    def _tracker_seconds(self, counters: dict[str, int]) -> float:
        """Events as sampled, module hooks as calibrated when installed, labels and the ends of steps as measured."""
        seconds = self._own_seconds
        for labeler in self._labelers:
            seconds += labeler.hooks.seconds
        if counters:
            seconds += (counters["event_nanoseconds"] + counters["label_nanoseconds"]) / 1e9
            seconds += counters["num_hook_calls"] * (self._counting.frame_seconds if self._counting else 0.0)
        return seconds

    def _labeler_states(self) -> list[wire.Labeler]:
        states = [
            wire.Labeler(
                name=labeler.name,
                up=not labeler.hooks.failure,
                reason=labeler.hooks.failure or getattr(labeler, "missing", ""),
            )
            for labeler in self._labelers
        ]
        stepless = NO_STEP if self._num_forwards >= MAX_FORWARDS_IN_STEP else ""
        return [
            wire.Labeler(
                name="engine", up=not self._engine_failure, reason=self._engine_failure or self._engine_remark
            ),
            wire.Labeler(name="cuda", up=not self._cuda_failure, reason=self._cuda_failure),
            wire.Labeler(name="step", up=not stepless, reason=stepless),
            *self._forecast_states(),
            *states,
        ]

    def _forecast_states(self) -> list[wire.Labeler]:
        if self._forecast is None:  # nobody asked for one
            return []
        failure = self._forecast.failure
        return [wire.Labeler(name="forecast", up=not failure, reason=failure)]

    def _hold_against_forecast(self, identity: wire.Identity, model: nn.Module) -> None:
        if self.settings.forecast is None:
            return
        self._forecast = held_forecast(self.settings.forecast, identity, model)
        if self._forecast.failure:
            reason = f"torchmem holds the job against no forecast: {self._forecast.failure}"
            warnings.warn(reason, RuntimeWarning, stacklevel=4)

    def _start_publisher(self, rank: int) -> None:
        try:
            store = RankStore(self.settings.dir, self.settings.train_job, rank)
        except StoreError as error:
            warnings.warn(f"torchmem publishes nothing: {error}", RuntimeWarning, stacklevel=4)
            return
        self._publisher = Publisher(
            store, lambda final: wire.encode(self._record(final=final)), self.settings.publish_interval
        )
        self._publisher.start()


def _whole(tokens: Any) -> int:
    """A size as the record holds it; 0, which means unknown, for what is none."""
    try:
        return min(max(0, int(tokens)), MAX_INPUT_SIZE)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return 0
