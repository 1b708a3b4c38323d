"""torch.compile: whose bytes a compiled function makes, and the steps of compiled optimizers.

A compiled module needs nothing from here: its frame is opened outside of the compiled call (see ``frames``). Two
things do. A compiled *function* that calls the model leaves no module call behind: there each graph that Dynamo
compiled is wrapped, where Dynamo keeps it (a global named ``__compiled_fn_...``), and says by its arguments whose it
is: the module that holds the parameters among them, or an optimizer's step, when a parameter and its gradient are
both there. And a compiled optimizer step runs no hooks: that it stepped is seen by the versions of its state's
tensors before and after the outermost compiled call.

torch guards compiled optimizer steps on its tables of global optimizer hooks, so ours are hidden there meanwhile.

Private torch interfaces used, checked on attach: ``torch._dynamo.eval_frame._maybe_set_eval_frame``,
``torch._dynamo.output_graph.OutputGraph.install_global_unsafe``, ``Optimizer._patch_step_function``.

Invariants: Dynamo compiles the same frames, breaks at the same places and recompiles as often as without; a wrapped
graph runs exactly once, with its own result or exception; after ``detach`` the globals hold torch's own functions.

Limits: what changes an optimizer's state in place between two compiled calls of one step, and is no step, counts as one
when the second returns; what an optimizer that torch.compile cannot compile (LBFGS) allocates inside a compiled
function is not told from the rest; while one thread is in a compiled function, eager optimizer steps of others end no
step; two steps of one optimizer inside one compiled call count as one; a step that ends in an exception counts for
none; graphs that torch.compile does not keep in globals (ahead-of-time compiled ones) count for the module around them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from torchmem.labelers import step_hooks
from torchmem.labelers.call_patch import skip_in_dynamo
from torchmem.labelers.compiled_steps import CompiledSteps, open_depth
from torchmem.labelers.frames import Frame, ModuleFrames
from torchmem.labelers.hooks import HookSet, is_from_signal_handler
from torchmem.labelers.optimizer import OptimizerLabeler
from torchmem.labelers.owners import ROOT_OWNER, OwnerTable, storages
from torchmem.model import OUTSIDE_OWNER, RefType

_MAX_HELD = 100_000
"""Objects looked at to find what a graph holds."""
_EMPTY_CELL = CellType()
_GRAPH_PREFIX = "__compiled_fn"
_COMPILED_CALL = "compile_wrapper"
"""Name of the function that torch.compile puts around whatever it compiles."""


class CompiledLabeler:
    """Labels what compiled functions allocate and ends the steps of compiled optimizers.

    Args:
        native: the loaded engine.
        owners: the table of owners.
        frames: the frames of module calls.
        optimizers: the labeler of eager optimizer steps.
    """

    name = "compiled"

    def __init__(
        self,
        native: Any,
        owners: OwnerTable,
        frames: ModuleFrames,
        optimizers: OptimizerLabeler,
    ) -> None:
        self.hooks = HookSet(self.name)
        self._graphs = _Graphs(native, owners, frames, optimizers, self.hooks)
        self._steps = CompiledSteps(native, optimizers, self.hooks)

    def attach(self) -> None:
        """Wraps the graphs that exist and those to come.

        Raises:
            AttributeError: this torch keeps its compiled graphs elsewhere.
        """
        import torch._dynamo  # every optimizer imports it anyway
        from torch._dynamo import eval_frame, output_graph

        for owner, name in (
            (eval_frame, "_maybe_set_eval_frame"),
            (output_graph.OutputGraph, "install_global_unsafe"),
            (Optimizer, "_patch_step_function"),
            *((torch_optimizer, name) for name in step_hooks.TABLES),
        ):
            if not hasattr(owner, name):
                raise AttributeError(f"torch {torch.__version__} has no {name}")
        self.hooks.on_off(self._steps.show_hooks)
        self.hooks.patch(output_graph.OutputGraph, "install_global_unsafe", self._graphs.wrapped_when_installed)
        self.hooks.patch(eval_frame, "_maybe_set_eval_frame", self._watched)
        self.hooks.patch(Optimizer, "_patch_step_function", self._steps.noted_when_made)
        self._graphs.wrap_existing()

    def detach(self) -> None:
        """Gives torch its own functions back."""
        self.hooks.close()
        self._graphs.unwrap()

    def _watched(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Around what switches Dynamo on and off for a thread: first and last thing of each compiled call."""
        hooks, steps, frame_of_caller = self.hooks, self._steps, sys._getframe  # noqa: SLF001  # the only way to tell who calls

        def set_eval_frame(callback: Any) -> Any:
            if hooks.active:
                caller = frame_of_caller(1)
                if caller.f_code.co_name == _COMPILED_CALL:
                    try:
                        (steps.leave if callback is None else steps.enter)(id(caller))
                    except Exception as error:  # nothing of ours may reach the training loop
                        if is_from_signal_handler(error):
                            raise
                        hooks.fail(error)
            return original(callback)

        return set_eval_frame


class _Kept(NamedTuple):
    """A wrapped graph and where Dynamo keeps it; lies on the wrapper, so that nothing else keeps them alive."""

    scope: dict[str, Any]
    name: str
    original: Any


_KEPT = "torchmem_kept"


class _Graphs:
    """The compiled graphs that run outside of any module call."""

    def __init__(
        self,
        native: Any,
        owners: OwnerTable,
        frames: ModuleFrames,
        optimizers: OptimizerLabeler,
        hooks: HookSet,
    ) -> None:
        self._native = native
        self._owners = owners
        self._frames = frames
        self._optimizers = optimizers
        self._hooks = hooks
        self._wrappers: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()

    def wrap_existing(self) -> None:
        """Wraps the graphs that were compiled before, in the globals of any module."""
        for module in list(sys.modules.values()):
            scope = getattr(module, "__dict__", None)
            if isinstance(scope, dict):
                for name in [n for n in list(scope) if isinstance(n, str) and n.startswith(_GRAPH_PREFIX)]:
                    self._wrap(scope, name)

    def wrapped_when_installed(self, original: Callable[..., None]) -> Callable[..., None]:
        """Around the function by which Dynamo keeps a graph."""

        def install_global_unsafe(graph: Any, name: str, value: Any) -> None:
            original(graph, name, value)
            if self._hooks.active and name.startswith(_GRAPH_PREFIX):
                try:
                    self._wrap(graph.global_scope, name)
                except Exception as error:  # nothing of ours may reach the training loop
                    if is_from_signal_handler(error):
                        raise
                    self._hooks.fail(error)

        return install_global_unsafe

    def unwrap(self) -> None:
        """Puts the graphs back as they were."""
        for wrapper in list(self._wrappers):
            kept: _Kept = vars(wrapper)[_KEPT]
            if kept.scope.get(kept.name) is wrapper:
                kept.scope[kept.name] = kept.original
        self._wrappers.clear()

    def _wrap(self, scope: dict[str, Any], name: str) -> None:
        original = scope[name]
        if not callable(original):
            return
        wrapper = self._labelled(original)
        vars(wrapper)[_KEPT] = _Kept(scope, name, original)
        self._wrappers.add(wrapper)
        scope[name] = wrapper

    def _labelled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self._hooks
        run: Callable[..., Any] | None = None

        def graph(*args: Any, **kwargs: Any) -> Any:
            nonlocal run
            if not hooks.active or self._is_known():
                return original(*args, **kwargs)
            if run is None:  # whose a graph is does not change
                run = self._runner(original, args)
            return run(*args, **kwargs)

        skip_in_dynamo(graph, recursive=True)
        return graph

    def _is_known(self) -> bool:
        """Whether a module's frame, or a label, is open: it says whose the bytes are."""
        try:
            self._optimizers.drop_stale_labels()
            return bool(open_depth(self._native))
        except Exception as error:  # nothing of ours may reach the training loop
            if is_from_signal_handler(error):
                raise
            self._hooks.fail(error)
            return True

    def _runner(self, original: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            # Those that Dynamo takes to stay at their addresses, as after a compiled step, are no arguments.
            tensors = {id(t): t for t in (*args, *_held_by(original)) if isinstance(t, torch.Tensor)}
            if _has_parameter_and_gradient(tensors):
                return functools.partial(self._run_step, original)
            owner = self._owner_of(tensors)
            if owner == OUTSIDE_OWNER:
                return original
            frames = [self._frames.frame_of(one) for one in dict.fromkeys((ROOT_OWNER, owner))]
        except Exception as error:  # as above
            if is_from_signal_handler(error):
                raise
            self._hooks.fail(error)
            return original
        return functools.partial(self._run_forward, original, frames)

    def _run_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._guard(self._optimizers.label_held)
        depth = self._native.push_label(OUTSIDE_OWNER, RefType.TEMPORARY)
        try:
            return original(*args, **kwargs)
        finally:
            self._native.cut_stack(depth)

    def _run_forward(self, original: Callable[..., Any], frames: list[Frame], *args: Any, **kwargs: Any) -> Any:
        self._guard(functools.partial(self._label_inputs, args))
        for frame in frames:
            frame.enter()
        try:
            return original(*args, **kwargs)
        finally:
            for frame in reversed(frames):
                frame.leave()

    def _label_inputs(self, args: tuple[Any, ...]) -> None:
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
                for storage in storages(tensor):
                    booked = self._native.lookup(storage.data_ptr())
                    if booked is not None and booked[2] == RefType.OTHER:
                        self._native.adopt(storage._cdata, ROOT_OWNER, RefType.INPUT)  # noqa: SLF001  # the address of the StorageImpl

    def _guard(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # as above
            if is_from_signal_handler(error):
                raise
            self._hooks.fail(error)

    def _owner_of(self, tensors: dict[int, torch.Tensor]) -> int:
        """The outermost module of which the graph has every parameter, else the innermost that holds all it has."""
        here = self._num_below(tensors.values())
        everywhere = self._num_below(self._owners.model.parameters())
        holders = [owner for owner in here if here[owner] == max(here.values())]  # a chain, parents first
        whole = [owner for owner in sorted(holders) if here[owner] == everywhere[owner]]
        return min(whole, default=max(holders, default=OUTSIDE_OWNER))

    def _num_below(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """How many of the tensors are parameters of each module or of one inside it."""
        found: dict[int, int] = {}
        for tensor in tensors:
            owner = self._owners.of_parameter(tensor)
            while owner != OUTSIDE_OWNER:
                found[owner] = found.get(owner, 0) + 1
                owner = self._owners.parents[owner]
        return found


def _has_parameter_and_gradient(tensors: dict[int, torch.Tensor]) -> bool:
    parameters = (t for t in tensors.values() if isinstance(t, torch.nn.Parameter))
    return any(p.grad is not None and id(p.grad) in tensors for p in parameters)


def _held_by(graph: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """The tensors that a compiled graph holds, found in the closures, lists and modules that backends wrap it in."""
    seen: set[int] = set()
    waiting: list[Any] = [graph]
    while waiting and len(seen) < _MAX_HELD:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, torch.fx.GraphModule):
            waiting += [*one.parameters(), *one.buffers()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, MethodType):
            waiting.append(one.__self__)
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args]
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY_CELL]
