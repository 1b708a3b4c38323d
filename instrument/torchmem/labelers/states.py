"""Module states: what the devices held before and after each module's forward and backward, and at most meanwhile.

Forward states come from the calls of modules (``calls``): before everything that a call does, and after it. Of a module
that prepares and tidies up around its forward there are two moments more: FSDP2 unshards and reshards in hooks, so ours
lie behind and before them; FSDP1 and DDP do it inside their wrapper's forward, so there the calls of the wrapped module
stand for the inner two. Of other modules the moments before and after are the same snapshot. A forward inside a
backward is a recomputation and has two states only.

Backward states of a module begin with the first gradient of its outputs and end with the last one of its inputs, or
with the whole backward where no input has one; nothing stands between the moments before and after, which are the same
snapshot. FSDP modules have theirs around their own pre- and post-backward; those of a module's several parameter
groups count as one.

Private torch interfaces used, checked on attach: ``FSDPParamGroup.pre_backward``, ``post_backward``, ``modules``;
``torch.distributed.fsdp._runtime_utils._pre_backward_hook``, ``_post_backward_hook``; the engine's final callbacks.

Invariants: only modules sharded by FSDP2 get hooks; no tensor is kept alive; each module keeps the last
``KEPT_SNAPSHOTS`` of each state.

Limits: gradients of leaf inputs are not waited for (a hook on a leaf would outlive its graph); a backward that fails
has no end; inside a compiled module there are no states; a forward that begins on another thread while a backward runs
ends that backward's peaks.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import nn

from torchmem.labelers.calls import ModuleCalls
from torchmem.labelers.fsdp2 import param_groups
from torchmem.labelers.hooks import HookSet
from torchmem.labelers.module_stats import ModuleState, ModuleStats, storage_bytes
from torchmem.labelers.owners import tensors_in
from torchmem.snapshots import Packed, pack


class _Backward:
    """One backward of one module."""

    def __init__(self, stats: ModuleStats, task: int, watch: int, num_ends: int) -> None:
        self.stats = stats
        self.task = task
        self.watch = watch
        self.num_ends = num_ends
        """How often its end may still move: gradients of inputs, parameter groups."""
        self.entries: dict[ModuleState, list[Packed]] = {}

    def first(self, state: ModuleState, packed: Packed) -> None:
        """Keeps the snapshot unless the state has one."""
        if state not in self.entries:
            self.entries[state] = self.stats.keep(state, packed)

    def last(self, state: ModuleState, packed: Packed) -> None:
        """Keeps the snapshot in the place of an earlier one."""
        self.first(state, packed)
        self.entries[state][0] = packed


class _Forward:
    """One forward of one module, until the graph it made is gone."""

    def __init__(self, module: nn.Module, watch: int) -> None:
        self.module = weakref.ref(module)
        self.watch = watch
        self.num_inputs = 0
        self.nodes: set[Any] = set()
        """The autograd nodes of the inputs; emptied after the forward, which they would otherwise keep alive."""
        self.backward: _Backward | None = None


class StatesLabeler:
    """Fills the stats of each module of a model; only looks, and labels nothing.

    Args:
        native: the loaded engine.
        model: the root module.
        stats: where to; cleared by the user at any time.
        label_gradients: called before a snapshot after a module's backward, so that its gradients have their name.
    """

    name = "states"

    def __init__(
        self,
        native: Any,
        model: nn.Module,
        stats: MutableMapping[nn.Module, ModuleStats],
        label_gradients: Callable[[], None],
    ) -> None:
        self.hooks = HookSet(self.name)
        self._native = native
        self._model = model
        self._stats = stats
        self._label_gradients = label_gradients
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._num_groups: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._module_calls: ModuleCalls | None = None
        self._thread = threading.local()
        self._watches: set[int] = set()
        self._open: list[_Backward] = []
        self._of_fsdp: dict[int, _Backward] = {}
        self._tasks: set[int] = set()

    def attach(self) -> None:
        """Observes the calls of modules, and FSDP's pre- and post-backward."""
        self.hooks.on_off(self._drop_everything)
        root = type(self._model).__name__
        for name, module in self._model.named_modules():
            self._names[module] = f"{root}.{name}" if name else root
            self._find_wrapped(module)
        groups = param_groups(self._model)
        for module in (module for group in groups for module in group.modules if module in self._names):
            self._num_groups[module] = self._num_groups.get(module, 0) + 1
        before, after = self.hooks.guarded(self._before_call), self.hooks.guarded(self._after_call)
        self._module_calls = ModuleCalls(self.hooks, before, after, self._names.__contains__)
        if groups:
            self._hook_fsdp2()
            self._patch_fsdp2(groups)
        if any(_is_fsdp1(module) for module in self._wrapped):
            self._patch_fsdp1()

    def detach(self) -> None:
        """Takes everything off."""
        self.hooks.close()

    # -- forward

    def _before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module not in self._names:
            return
        if (wrapper := self._wrapper_of(module)) is not None:
            self._inner_pre_forward(wrapper, self._now())
        if _graph_task() == -1:
            self._begin_forward(module, args, kwargs)
        elif not self._has_inner_moments(module):
            self._inner_pre_forward(module, self._now())

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # Not at another thread's first forward, which may belong to one that runs, nor where the root calls itself.
        if module is self._model and not self._is_inside_itself(module):
            self._drop_everything()
        stats = self._stats_of(module)
        stats.input_mem = storage_bytes(tensors_in((args, kwargs)))
        call = _Forward(module, self._start_watch())
        self._calls.append(call)
        packed = self._now()
        stats.keep(ModuleState.BEF_PRE_FW, packed)
        if not self._has_inner_moments(module):
            self._inner_pre_forward(module, packed)
        if torch.is_grad_enabled() and not self._is_fsdp(module):
            self._hook_inputs(call, tensors_in((args, kwargs)))

    def _is_inside_itself(self, module: nn.Module) -> bool:
        return bool(self._calls) and self._module_calls is not None and self._module_calls.is_inside_itself(module)

    def _after_call(self, module: nn.Module, output: Any) -> None:
        if module not in self._names:
            return
        packed = self._now()
        if not self._has_inner_moments(module):
            self._inner_post_forward(module, packed)
        if _graph_task() == -1 and (call := self._pop(module)):
            self._end_forward(module, call, output, packed)
        if (wrapper := self._wrapper_of(module)) is not None:
            self._inner_post_forward(wrapper, packed)

    def _end_forward(self, module: nn.Module, call: _Forward, output: Any, packed: Packed) -> None:
        stats = self._stats_of(module)
        stats.output_mem = storage_bytes(tensors_in(output))
        stats.keep(ModuleState.AFT_POST_FW, packed)
        rows = self._stop_watch(call.watch)
        stats.keep(ModuleState.PEAK_FW, pack(rows))
        stats.raise_peak(rows)
        if torch.is_grad_enabled() and not self._is_fsdp(module):
            self._hook_outputs(call, tensors_in(output))
        call.nodes.clear()

    def _inner_pre_forward(self, module: nn.Module, packed: Packed) -> None:
        state = ModuleState.AFT_PRE_FW if _graph_task() == -1 else ModuleState.PRE_FW_AC
        self._stats_of(module).keep(state, packed)

    def _inner_post_forward(self, module: nn.Module, packed: Packed) -> None:
        state = ModuleState.BEF_POST_FW if _graph_task() == -1 else ModuleState.POST_FW_AC
        self._stats_of(module).keep(state, packed)

    def _has_inner_moments(self, module: nn.Module) -> bool:
        """Whether something else tells when its preparations are over and its tidying up begins."""
        return module in self._wrapped or module in self._num_groups

    def _hook_fsdp2(self) -> None:
        def after_pre_forward(module: nn.Module, _args: Any) -> None:
            if module in self._names:  # a copy's hooks are its original's
                self._inner_pre_forward(module, self._now())

        def before_post_forward(module: nn.Module, _args: Any, _output: Any) -> None:
            if module in self._names:
                self._inner_post_forward(module, self._now())

        for module in self._num_groups:
            self.hooks.add(module.register_forward_pre_hook(self.hooks.guarded(after_pre_forward)))
            hook = self.hooks.guarded(before_post_forward)
            self.hooks.add(module.register_forward_hook(hook, prepend=True, always_call=True))

    def _find_wrapped(self, module: nn.Module) -> None:
        inner = _wrapped_module(module)
        if inner is not None:
            self._wrapped.add(module)
            self._wrappers[inner] = weakref.ref(module)

    def _wrapper_of(self, module: nn.Module) -> nn.Module | None:
        reference = self._wrappers.get(module)
        return None if reference is None else reference()

    @property
    def _calls(self) -> list[_Forward]:
        """This thread's running forwards."""
        calls: list[_Forward] = self._thread.__dict__.setdefault("calls", [])
        return calls

    def _pop(self, module: nn.Module) -> _Forward | None:
        """The innermost running forward of the module; those inside of it never returned."""
        if not any(call.module() is module for call in self._calls):
            return None
        while (call := self._calls.pop()).module() is not module:
            self._stop_watch(call.watch)
        return call

    # -- backward of plain modules

    def _hook_inputs(self, call: _Forward, inputs: Iterable[torch.Tensor]) -> None:
        hook = self.hooks.guarded(lambda _gradient: self._input_gradient(call))
        for tensor in inputs:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch's
                call.num_inputs += 1
                call.nodes.add(tensor.grad_fn)

    def _hook_outputs(self, call: _Forward, outputs: Iterable[torch.Tensor]) -> None:
        hook = self.hooks.guarded(lambda _gradient: self._output_gradient(call))
        for tensor in outputs:
            # An input handed through has no backward of this module.
            if tensor.requires_grad and tensor.grad_fn is not None and tensor.grad_fn not in call.nodes:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # as above

    def _output_gradient(self, call: _Forward) -> None:
        module, task = call.module(), _graph_task()
        if module is None or (call.backward is not None and call.backward.task == task):
            return
        call.backward = self._begin(self._stats_of(module), task, num_ends=call.num_inputs)
        packed = self._now()
        call.backward.first(ModuleState.BEF_PRE_BW, packed)
        call.backward.first(ModuleState.AFT_PRE_BW, packed)

    def _input_gradient(self, call: _Forward) -> None:
        backward = call.backward
        if backward is None or backward.task != _graph_task() or backward.num_ends == 0:
            return
        packed = self._now_with_gradients()
        backward.last(ModuleState.BEF_POST_BW, packed)
        backward.last(ModuleState.AFT_POST_BW, packed)
        self._end(backward)

    def _begin(self, stats: ModuleStats, task: int, num_ends: int) -> _Backward:
        backward = _Backward(stats, task, self._start_watch(), num_ends)
        self._open.append(backward)
        if task not in self._tasks:
            self._tasks.add(task)
            queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001  # torch's own way, also for FSDP
            close = self.hooks.guarded(lambda: self._close(task))
            # Behind the callbacks that others queue during the backward: FSDP's post-backward may be among them.
            queue(self.hooks.guarded(lambda: queue(close)))
        return backward

    def _end(self, backward: _Backward) -> None:
        """The end of a backward, as far as is known; the last call closes it."""
        backward.num_ends -= 1
        if backward.num_ends > 0:
            rows = self._native.read_watch(backward.watch)
        elif backward in self._open:
            self._open.remove(backward)
            rows = self._stop_watch(backward.watch)
        else:
            return
        backward.last(ModuleState.PEAK_BW, pack(rows))
        backward.stats.raise_peak(rows)

    def _close(self, task: int) -> None:
        """The whole backward is over: so is that of every module in it."""
        self._tasks.discard(task)
        for backward in [b for b in self._open if b.task == task]:
            packed = self._now_with_gradients()
            backward.first(ModuleState.BEF_POST_BW, packed)
            backward.first(ModuleState.AFT_POST_BW, packed)
            if ModuleState.PEAK_BW in backward.entries:  # it ended with the gradients that came
                self._open.remove(backward)
                self._stop_watch(backward.watch)
            else:
                backward.num_ends = 0
                self._end(backward)
        self._of_fsdp = {key: backward for key, backward in self._of_fsdp.items() if backward.task != task}

    # -- backward of FSDP modules

    def _is_fsdp(self, module: nn.Module) -> bool:
        return module in self._num_groups or (_is_fsdp1(module) and module._handle is not None)  # noqa: SLF001  # no public way

    def _patch_fsdp2(self, groups: list[Any]) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        self._patch_all(FSDPParamGroup, "pre_backward", "post_backward", lambda group, *_: group.modules)
        for group in groups:  # torch's own tracker leaves methods on them
            for name, around in (("pre_backward", self._around_pre), ("post_backward", self._around_post)):
                if name in vars(group):
                    self.hooks.patch_own(group, name, around(lambda group, *_: group.modules))

    def _patch_fsdp1(self) -> None:
        from torch.distributed.fsdp import _runtime_utils

        def modules(state: Any, *_: Any) -> tuple[nn.Module, ...]:
            return (state,) if state in self._names else ()

        self._patch_all(_runtime_utils, "_pre_backward_hook", "_post_backward_hook", modules)

    def _patch_all(self, owner: Any, pre: str, post: str, modules: Callable[..., Iterable[nn.Module]]) -> None:
        if missing := [name for name in (pre, post) if not hasattr(owner, name)]:
            raise AttributeError(f"{owner.__name__} of torch {torch.__version__} has no {', '.join(missing)}")
        self.hooks.patch(owner, pre, self._around_pre(modules))
        self.hooks.patch(owner, post, self._around_post(modules))

    def _around_pre(self, modules: Callable[..., Iterable[nn.Module]]) -> Callable[..., Any]:
        def before(*args: Any, **_: Any) -> None:
            for module in filter(self._is_fsdp, modules(*args)):
                self._fsdp_backward(module).first(ModuleState.BEF_PRE_BW, self._now())

        def after(*args: Any, **_: Any) -> None:
            for module in filter(self._is_fsdp, modules(*args)):
                self._fsdp_backward(module).last(ModuleState.AFT_PRE_BW, self._now())

        return functools.partial(self._around, before, after)

    def _around_post(self, modules: Callable[..., Iterable[nn.Module]]) -> Callable[..., Any]:
        def before(*args: Any, **_: Any) -> None:
            for module in filter(self._is_fsdp, modules(*args)):
                if backward := self._of_fsdp.get(id(module)):
                    backward.first(ModuleState.BEF_POST_BW, self._now_with_gradients())

        def after(*args: Any, **_: Any) -> None:
            for module in filter(self._is_fsdp, modules(*args)):
                if backward := self._of_fsdp.get(id(module)):
                    backward.last(ModuleState.AFT_POST_BW, self._now_with_gradients())
                    self._end(backward)
                    if backward.num_ends == 0:
                        del self._of_fsdp[id(module)]

        return functools.partial(self._around, before, after)

    def _around(self, before: Callable[..., None], after: Callable[..., None], original: Any) -> Any:
        guarded_before, guarded_after = self.hooks.guarded(before), self.hooks.guarded(after)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            guarded_before(*args, **kwargs)
            result = original(*args, **kwargs)
            guarded_after(*args, **kwargs)
            return result

        return wrapper

    def _fsdp_backward(self, module: nn.Module) -> _Backward:
        """The module's running backward, begun if need be."""
        backward, task = self._of_fsdp.get(id(module)), _graph_task()
        if backward is None or backward.task != task:
            backward = self._begin(self._stats_of(module), task, num_ends=self._num_groups.get(module, 1))
            self._of_fsdp[id(module)] = backward
        return backward

    # -- both

    def _stats_of(self, module: nn.Module) -> ModuleStats:
        stats = self._stats.get(module)
        if stats is None:
            stats = self._stats[module] = ModuleStats(self._names[module], module)
        return stats

    def _now(self) -> Packed:
        return pack(self._native.totals())

    def _now_with_gradients(self) -> Packed:
        self._label_gradients()
        return self._now()

    def _start_watch(self) -> int:
        watch: int = self._native.start_watch()
        self._watches.add(watch)
        return watch

    def _stop_watch(self, watch: int) -> list[tuple[int, int, bytes]]:
        if watch not in self._watches:
            return []
        self._watches.discard(watch)
        rows: list[tuple[int, int, bytes]] = self._native.stop_watch(watch)
        return rows

    def _drop_everything(self) -> None:
        """Forgets what an exception left unfinished."""
        self._calls.clear()
        self._open.clear()
        self._of_fsdp.clear()
        self._tasks.clear()
        for watch in list(self._watches):
            self._stop_watch(watch)


def _graph_task() -> int:
    """Autograd's running graph task; -1 outside of backward."""
    return torch._C._current_graph_task_id()  # noqa: SLF001  # the only way to ask


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _wrapped_module(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper that prepares in its own forward what the inner one needs."""
    if _is_fsdp1(module):
        inner: nn.Module = module._fsdp_wrapped_module  # type: ignore[assignment]  # noqa: SLF001  # as above
        return inner
    if isinstance(module, nn.parallel.DistributedDataParallel):
        ddp_inner: nn.Module = module.module
        return ddp_inner
    return None
