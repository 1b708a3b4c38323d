"""torch.compile under the monitor: compiled as without it, its bytes under the right name, its steps counted."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo import convert_frame, eval_frame, functional_export, output_graph
from torch._dynamo.utils import counters
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import optimizer as optim

import torchmem
from jobs import compiled
from jobs.compiled import BATCH, HOW, WIDTH, Case, Figures
from jobs.ranks import run_alone
from torchmem.labelers import compiled_steps as labeler
from torchmem.model import OUTSIDE, ROOT, Phase
from torchmem.validation import witness
from torchmem.wire.record import unpack_cells

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch's own, as its compiler is imported
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # and as it traces
]

WATCHED = ["before", "after", "again"]
LASTING = {"parameter", "gradient", "optimizer_state", "buffer"}
ODD = {
    "hooks_in_module": Case("module", make_model=compiled.hooked_stack),
    "hooks_in_function": Case("function", make_model=compiled.hooked_stack),
    "hooks_in_blocks": Case("blocks", make_model=compiled.hooked_stack),
    "breaks_in_module": Case("module", make_model=compiled.Broken),
    "breaks_in_function": Case("function", make_model=compiled.Broken),
    "breaks_in_wrapper": Case("wrapper", make_model=compiled.Broken),
    "step_of_sgd": Case("step", make_optimizer=torch.optim.SGD),
    "step_of_fused": Case("step", make_optimizer=functools.partial(torch.optim.AdamW, fused=True)),
    "step_without_foreach": Case("step_function", make_optimizer=functools.partial(torch.optim.AdamW, foreach=False)),
}


def settings(directory):
    return {"dir": directory, "train_job": "test", "publish_interval": 60.0}


@contextmanager
def healthy(directory, model, optimizer):
    """A monitor that fails the test when one of its labelers goes off."""
    with torchmem.install(model, optimizer, **settings(directory)) as monitor:
        yield monitor
        assert [(one.name, one.reason) for one in monitor.snapshot().labelers if not one.up] == []
        assert monitor.snapshot().counters["num_unmatched_pops"] == 0


@pytest.fixture
def monitored(tmp_path):
    return functools.partial(healthy, tmp_path)


@pytest.fixture(scope="module")
def bare():
    """Figures of a case that nobody watches, run once."""
    return functools.cache(lambda case: compiled.run(case, "never", lambda *_: pytest.fail("nobody watches")))


def book(record, name="usage"):
    [device] = record.devices
    cells = unpack_cells(getattr(device, name))
    return {(record.modules[c.module], record.reftypes[c.reftype]): c.num_bytes for c in cells}


def made(record, name="usage"):
    """The same without what lasts."""
    return {key: num_bytes for key, num_bytes in book(record, name).items() if key[1] not in LASTING}


@pytest.mark.parametrize("schedule", [pytest.param("before", marks=pytest.mark.slow), "after", "again"])
@pytest.mark.parametrize("how", HOW)
def test_compiled_as_without_the_monitor(how, schedule, bare, monitored):
    """Watching would break graphs, compile other frames, make torch compile again, or change a result."""
    assert compiled.run(Case(how), schedule, monitored) == bare(Case(how))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WATCHED)
@pytest.mark.parametrize("name", ODD)
def test_odd_jobs_are_compiled_as_without_the_monitor(name, schedule, bare, monitored):
    """Hooks of the user's own, graph breaks or another optimizer would make a difference after all."""
    assert compiled.run(ODD[name], schedule, monitored) == bare(ODD[name])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WATCHED)
@pytest.mark.parametrize("how", ["module", "wrapped_blocks", "function", "both"])
def test_compiled_backward_is_compiled_as_without_the_monitor(how, schedule, bare, monitored):
    """Watching would change what AOTAutograd makes of forward, backward or step."""
    assert compiled.run(Case(how, "aot_eager"), schedule, monitored) == bare(Case(how, "aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", WATCHED)
def test_inductor_compiles_as_without_the_monitor(schedule, bare, monitored):
    """Watching would change what the default backend compiles, or its results."""
    # A second run would find the first one's code.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        assert compiled.run(Case("both", "inductor"), schedule, monitored) == bare(Case("both", "inductor"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "function"])
def test_guards_on_hooks_hold(how, monitored):
    """A job that has torch guard on empty hook tables would be compiled again at every call."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        never = compiled.run(Case(how), "never", monitored)
        assert [compiled.run(Case(how), schedule, monitored) for schedule in WATCHED] == [never] * len(WATCHED)


def test_nothing_is_compiled_again(monitored):
    """A guard of torch's would look at something that the monitor changes."""
    case = Case("both")
    parts = compiled.make(case)
    compiled.compile_(case, parts)
    compiled.step(parts)
    compiled.step(parts)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            with monitored(parts.model, parts.optimizer):
                compiled.step(parts)
            compiled.step(parts)


def test_a_reset_of_dynamo_changes_nothing(monitored):
    """After torch._dynamo.reset() the monitor's wrapper would be traced, and break every graph."""
    case = Case("module")
    parts = compiled.make(case)
    compiled.compile_(case, parts)
    with monitored(parts.model, parts.optimizer):
        compiled.step(parts)
        torch._dynamo.reset()
        counters.clear()
        compiled.step(parts)
    assert dict(counters["frames"]) == {"total": 1, "ok": 1}
    assert not counters["graph_break"]


def export_strictly(model, inputs):
    return torch.export.export(model, (inputs,), strict=True).graph_module.code


def export_loosely(model, inputs):
    return torch.export.export(model, (inputs,), strict=False).graph_module.code


def export_by_dynamo(model, inputs):
    return torch._dynamo.export(model)(inputs).graph_module.code


def capture(model, inputs):
    return functional_export.dynamo_graph_capture_for_export(model)(inputs).code


def compile_ahead(model, inputs):
    def forward(x):
        return model(x)

    return torch.compile(forward, fullgraph=True).aot_compile(((inputs,), {}))(inputs).tolist()


@pytest.mark.parametrize("make", [compiled.Stack, compiled.hooked_stack], ids=["plain", "hooks"])
@pytest.mark.parametrize(
    "export",
    [
        export_strictly,
        export_loosely,
        export_by_dynamo,
        capture,
        pytest.param(compile_ahead, marks=pytest.mark.slow),
    ],
)
def test_exported_as_without_the_monitor(export, make, monitored):
    """A job that exports its model while it is watched would fail on our wrapper, or find it in the graph."""
    torch.manual_seed(0)
    model, inputs = make(), torch.randn(BATCH, WIDTH)
    torch._dynamo.reset()
    bare = export(model, inputs)
    torch._dynamo.reset()
    with monitored(model, None) as monitor:
        assert export(model, inputs) == bare
        output = model(inputs)
        monitor.step()
        assert output.numel()
        assert "blocks.1.up" in {name for name, reftype in made(monitor.snapshot()) if reftype == "activation"}


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", ["module", "wrapper", "function", "nested", "both"])
def test_bytes_belong_to_the_compiled_module(how, early, tmp_path):
    """What a compiled model makes in its forward would belong to nobody, or to a module inside it."""
    case = Case(how, "aot_eager")
    parts = compiled.make(case)
    if not early:
        compiled.compile_(case, parts)
        compiled.step(parts)
    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        if early:
            compiled.compile_(case, parts)
        compiled.step(parts)
        inputs = torch.randn(BATCH, WIDTH)
        output = parts.forward(inputs)
        monitor.step()
        usage = made(monitor.snapshot())
        assert set(usage) == {(ROOT, "activation"), (ROOT, "input")}
        assert usage[ROOT, "input"] == inputs.untyped_storage().nbytes()
        assert usage[ROOT, "activation"] > output.untyped_storage().nbytes()
        phases = memoryview(monitor.snapshot().ring.phases).cast("q").tolist()
        assert phases == [Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER, Phase.FORWARD]


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("how", ["blocks", "wrapped_blocks"])
def test_bytes_belong_to_the_compiled_submodule(how, early, tmp_path):
    """What a compiled block makes would belong to the model around it, or to a module inside it."""
    case = Case(how, "aot_eager")
    parts = compiled.make(case)
    if not early or how == "wrapped_blocks":  # a block that is replaced later is a stranger
        compiled.compile_(case, parts)
    if not early:
        compiled.step(parts)
    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        compiled.compile_(case, parts) if early and how == "blocks" else None
        compiled.step(parts)
        parts.forward(torch.randn(BATCH, WIDTH)).sum().backward()
        output = parts.forward(torch.randn(BATCH, WIDTH))
        monitor.step()
        usage = made(monitor.snapshot())
        assert output.numel()
        assert {name for name, reftype in usage if reftype == "activation"} == {
            *("first", "blocks.0", "blocks.1", "blocks.2", "last")
        }
        assert usage["blocks.0", "activation"] == usage["blocks.1", "activation"] == usage["blocks.2", "activation"]


@pytest.mark.parametrize("how", ["module", "wrapper", "function"])
def test_backward_belongs_to_the_compiled_module(how, tmp_path):
    """What a compiled backward allocates would be found under no module, or under a module inside."""
    case = Case(how, "aot_eager")
    parts = compiled.make(case)
    compiled.compile_(case, parts)
    compiled.step(parts)
    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        monitor.step()
        loss = parts.forward(torch.randn(BATCH, WIDTH)).square().mean()
        monitor._native.rotate_windows()
        monitor._native.rotate_windows()
        monitor.step()
        loss.backward()
        monitor.step()
        peak = made(monitor.snapshot(), "step_peak")
        temporary = {name: num_bytes for (name, reftype), num_bytes in peak.items() if reftype == "temporary"}
        assert temporary[ROOT] > 0
        assert set(temporary) <= {ROOT, OUTSIDE}  # outside: the gradient of the loss
        assert temporary.get(OUTSIDE, 0) <= 2 * BATCH * WIDTH * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("passed", [True, False], ids=["passed", "found"])
def test_compiled_steps(backend, early, passed, tmp_path):
    """A compiled step would end no step, or two; its scratch, its state or the gradients have a wrong name."""
    case = Case("step", backend)
    parts = compiled.make(case)
    if not early:
        compiled.compile_(case, parts)
        compiled.step(parts)
    with torchmem.install(parts.model, parts.optimizer if passed else None, **settings(tmp_path)) as monitor:
        if early:
            compiled.compile_(case, parts)
        for number in range(1, 4):
            compiled.step(parts)
            assert monitor.snapshot().clock.step == number
        monitor._native.rotate_windows()
        monitor._native.rotate_windows()
        parts.forward(torch.randn(BATCH, WIDTH)).square().mean().backward()
        parts.update()
        usage, peak = book(monitor.snapshot()), book(monitor.snapshot(), "step_peak")
    for name in ("first", "blocks.1.up", "last"):
        parameters = list(parts.model.get_submodule(name).parameters())
        state = [value for p in parameters for value in parts.optimizer.state[p].values()]
        for composition in (usage, peak):
            assert composition[name, "parameter"] == sum(p.untyped_storage().nbytes() for p in parameters)
            assert composition[name, "gradient"] == composition[name, "parameter"]
            assert composition[name, "optimizer_state"] == sum(v.untyped_storage().nbytes() for v in state)
    assert peak[OUTSIDE, "temporary"] > 0
    assert "other" not in {reftype for _, reftype in peak}


@pytest.mark.parametrize("name", ["step_of_sgd", "step_of_fused", "step_without_foreach"])
def test_steps_of_other_optimizers_are_counted(name, tmp_path):
    """An optimizer without state, or one whose kernel is not compiled, would step unnoticed."""
    parts = compiled.make(ODD[name])
    with torchmem.install(parts.model, **settings(tmp_path)) as monitor:
        compiled.compile_(ODD[name], parts)
        for _ in range(3):
            compiled.step(parts)
        assert monitor.snapshot().clock.step == 3


def test_what_is_no_step_is_none(tmp_path):
    """A compiled function that clamps the weights, clips gradients or evaluates would count as a training step."""
    parts = compiled.make(Case("nothing"))

    @torch.compile(backend="eager")
    def clamp():
        with torch.no_grad():
            for parameter in parts.model.parameters():
                parameter.clamp_(-1, 1)

    @torch.compile(backend="eager")
    def clip():
        torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 0.1)

    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        for number in range(1, 3):
            parts.forward(torch.randn(BATCH, WIDTH)).sum().backward()
            clip()
            parts.update()
            clamp()
            assert monitor.snapshot().clock.step == number


def test_a_failed_compiled_step_counts_for_none(tmp_path):
    """A compiled step that raises would end the step, or leave its label on what follows."""
    parts = compiled.make(Case("nothing"))

    @torch.compile(backend="eager")
    def update():
        parts.optimizer.step()
        raise ValueError("theirs")

    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        compiled.step(parts)
        parts.forward(torch.randn(BATCH, WIDTH)).sum().backward()
        with pytest.raises(ValueError, match="theirs"):
            update()
        assert monitor.snapshot().clock.step == 1
        assert monitor._native.stack_depth() == 0
        compiled.step(parts)
        assert monitor.snapshot().clock.step == 2


def test_a_function_compiled_after_a_step_still_has_an_owner(tmp_path):
    """Parameters that a compiled step has pinned are no arguments of later graphs, which would belong to nobody."""
    parts = compiled.make(Case("step", "aot_eager"))
    compiled.compile_(Case("step", "aot_eager"), parts)
    compiled.step(parts)
    compiled.compile_(Case("function", "aot_eager"), parts)
    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        compiled.step(parts)
        output = parts.forward(torch.randn(BATCH, WIDTH))
        monitor.step()
        assert output.numel()
        assert {name for name, reftype in made(monitor.snapshot()) if reftype == "activation"} == {ROOT}


def test_a_function_on_a_part_of_the_model(tmp_path):
    """A compiled function that calls one block would be booked under the model, or under a module inside the block."""
    parts = compiled.make(Case("nothing"))
    block = parts.model.blocks[1]

    @torch.compile(backend="aot_eager")
    def call(x):
        return block(x)

    with torchmem.install(parts.model, parts.optimizer, **settings(tmp_path)) as monitor:
        output = call(torch.randn(BATCH, WIDTH))
        monitor.step()
        assert output.numel()
        assert {name for name, reftype in made(monitor.snapshot()) if reftype == "activation"} == {"blocks.1"}


def globals_of_graphs():
    scopes = [module.__dict__ for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return {(id(s), name): s[name] for s in scopes for name in list(s) if name.startswith("__compiled_fn")}


def test_close_gives_torch_its_functions_back(monitored):
    """A wrapper of ours would stay in torch, or in the globals of a compiled function."""
    case = Case("both")
    parts = compiled.make(case)
    compiled.compile_(case, parts)
    compiled.step(parts)

    def private():
        return (
            vars(nn.Module)["__call__"],
            eval_frame._maybe_set_eval_frame,
            vars(output_graph.OutputGraph)["install_global_unsafe"],
            vars(optim.Optimizer)["_patch_step_function"],
            dict(vars(torch._dynamo.callback_handler)),
            convert_frame.fullgraph_capture,
            functional_export.fullgraph_capture,
            dict(optim._global_optimizer_pre_hooks),
            dict(optim._global_optimizer_post_hooks),
            globals_of_graphs(),
        )

    before = private()
    assert before[-1]
    with monitored(parts.model, parts.optimizer):
        compiled.step(parts)
        assert private()[-1] != before[-1]
    assert private() == before


def test_graphs_compiled_meanwhile_are_given_back(monitored):
    """What was compiled under the monitor would call it for good."""
    case = Case("function")
    parts, before = compiled.make(case), globals_of_graphs()
    with monitored(parts.model, parts.optimizer):
        compiled.compile_(case, parts)
        compiled.step(parts)
    new = [graph for key, graph in globals_of_graphs().items() if key not in before]
    assert new
    assert all("torchmem" not in graph.__code__.co_filename for graph in new)


def test_a_compiled_model_that_is_dropped_is_freed(monitored):
    """The graphs of a compiled function would live, with all they hold, until the next one is compiled."""
    keeper = compiled.make(Case("nothing"))

    def compile_and_drop():
        model = compiled.make(Case("nothing")).model

        def call(x):
            return model(x)

        torch.compile(call, backend=backend)(torch.randn(BATCH, WIDTH)).sum().backward()

    def backend(graph, _inputs):
        graphs.append(weakref.ref(graph))
        return graph

    graphs = []
    with monitored(keeper.model, keeper.optimizer):
        compile_and_drop()
        torch._dynamo.reset()  # until then torch itself keeps it
        gc.collect()
        assert [graph() for graph in graphs] == [None]


def test_an_optimizers_tensors_are_looked_at_once_a_step(monitored, monkeypatch):
    """Each call of each compiled function would cost the reading of every parameter's state, twice."""
    parts, read = compiled.make(Case("nothing")), []
    versions = labeler._versions
    monkeypatch.setattr(
        labeler, "_versions", lambda one: (read.append(one) if one is parts.optimizer else None, versions(one))[1]
    )
    compiled.compile_(Case("function"), parts)
    compiled.compile_(Case("step"), parts)
    loss = torch.compile(lambda output: output.square().mean(), backend="eager")
    with monitored(parts.model, parts.optimizer) as monitor:
        for number in range(1, 5):
            read.clear()
            loss(parts.forward(torch.randn(BATCH, WIDTH))).backward()
            parts.update()
            assert monitor.snapshot().clock.step == number
            assert len(read) == 1 + 3  # before the first call, after each


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_half_a_step_is_none(where, monitored):
    """A step that failed half-way would be counted when the next compiled function returns."""
    parts = compiled.make(Case("nothing"))
    look = torch.compile(lambda x: x + 1, backend="eager")

    def fail_after_a_change():
        with torch.no_grad():
            for state in parts.optimizer.state.values():
                state["step"] += 1
        raise ValueError("theirs")

    def update():
        if where == "inside":
            torch.compile(fail_after_a_change, backend="eager")()
        else:
            parts.optimizer.register_step_pre_hook(lambda *_: fail_after_a_change())
            parts.optimizer.step()

    with monitored(parts.model, parts.optimizer) as monitor:
        compiled.step(parts)
        look(torch.ones(1))
        with pytest.raises(ValueError, match="theirs"):
            update()
        look(torch.ones(1))
        assert monitor.snapshot().clock.step == 1


def test_an_eager_step_beside_a_compiled_call(monitored):
    """A thread in the middle of its optimizer's step would fail because another one calls a compiled function."""
    parts, other = compiled.make(Case("nothing")), torch.optim.SGD(nn.Linear(2, 2).parameters())
    look = torch.compile(lambda x: x + 1, backend="eager")
    inside, may_go_on, failures = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        may_go_on.wait(30)

    def step():
        try:
            other.step()
        except RuntimeError as error:
            failures.append(error)

    with monitored(parts.model, parts.optimizer):
        look(torch.ones(1))
        handles = [optim.register_optimizer_step_pre_hook(hook) for hook in (wait, lambda *_: None)]
        thread = threading.Thread(target=step)
        thread.start()
        try:
            inside.wait(30)
            look(torch.ones(1))
        finally:
            may_go_on.set()
            thread.join()
            for handle in handles:
                handle.remove()
    assert failures == []


def count_calls(case_of, watcher):
    """Calls of compiled graphs in a step: before, with and after the watcher."""
    calls = []

    def backend(graph, _inputs):
        def run(*args):
            calls.append(graph)
            return graph.forward(*args)

        return run

    parts = compiled.make(case_of(backend))
    compiled.compile_(case_of(backend), parts)

    def one_step():
        calls.clear()
        compiled.step(parts)
        return len(calls)

    before = one_step()
    with watcher(parts.model, parts.optimizer):
        during = one_step()
    return before, during, one_step()


@contextmanager
def torchs_tracker(model, optimizer):
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield


@contextmanager
def our_tracker(model, optimizer):
    with torchmem.MemTracker(model, optimizer):
        yield


@pytest.mark.parametrize("how", ["module", "blocks"])
def test_unlike_torchs_tracker_compilation_stays_on(how, monitored):
    """Ours, as torch's own tracker does, would turn compiled code off for good without a word."""
    case_of = functools.partial(Case, how)
    num_graphs = 3 if how == "blocks" else 1
    assert count_calls(case_of, torchs_tracker) == (num_graphs, 0, 0)
    assert count_calls(case_of, monitored) == (num_graphs, num_graphs, num_graphs)
    assert count_calls(case_of, our_tracker) == (num_graphs, num_graphs, num_graphs)


def run_sharded(_rank: int, _world_size: int, directory: str, case: Case) -> dict[str, Figures]:
    """The case under every schedule."""
    monitored = functools.partial(healthy, directory)
    return {schedule: compiled.run(case, schedule, monitored) for schedule in compiled.SCHEDULES}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["blocks", "wrapped_blocks", "module", "both"])
def test_sharded_jobs_are_compiled_as_without_the_monitor(how, tmp_path):
    """The patches on FSDP2 would be traced, break graphs, or fail a guard."""
    found = run_alone(run_sharded, 2, str(tmp_path), Case(how, sharded=True))
    assert found["never"].graphs > 0
    assert found == dict.fromkeys(found, found["never"])


def watch_against_witness(_rank: int, _world_size: int, directory: str):
    """Every way to compile, beside the witness."""
    witness.install()
    return {how: compiled.against_witness(Case(how, "aot_eager"), directory, 3) for how in HOW}


@pytest.mark.slow
def test_step_peaks_are_the_truth(tmp_path):
    """Compiled code would allocate past the tap, or what lasts be booked as something else."""
    for how, (steps, disabled) in run_alone(watch_against_witness, 1, str(tmp_path)).items():
        assert disabled == []
        assert [(one.peak_error, one.end_error) for one in steps] == [(0, 0)] * 3, how
        assert [one.books for one in steps] == [one.storages for one in steps], how
