"""HookSet: what is put on comes off again, and what fails stays inside."""

from __future__ import annotations

import functools
import gc
import signal
import weakref

import pytest

from torchmem.engine import native
from torchmem.labelers.hooks import HookSet
from torchmem.model import RefType


class Greeter:
    def greet(self, name):
        return f"hello {name}"


@pytest.fixture
def hooks():
    native.load().reset([0])
    return HookSet("test")


def label(hooks, target, *, find=None, after=None):
    """Patches ``target.greet`` the way labelers do, by a native label call."""
    engine = native.load()

    def make(original):
        call = engine.make_label_call(
            original, find or (lambda _: engine.make_target(0)), after, hooks.fail, int(RefType.ALL_GATHER), -1, -1
        )
        hooks.on_off(call.disable)
        return call

    hooks.patch(target, "greet", make)


def test_a_label_runs_around_the_original(hooks):
    """The original would run twice, not at all, with other arguments, or without the label."""
    engine, seen = native.load(), []

    class Mine(Greeter):
        def greet(self, name, *, suffix=""):
            seen.append(engine.stack_depth())
            return f"hello {name}{suffix}"

    label(hooks, Mine, after=seen.append)
    greeter = Mine()
    assert greeter.greet("you", suffix="!") == "hello you!"
    assert Mine.greet(greeter, name="me") == "hello me"
    assert seen == [1, greeter, 1, greeter]
    assert engine.stack_depth() == 0
    assert Mine.greet.__wrapped__(greeter, "you") == "hello you"
    hooks.close()


def test_close_restores_what_was_there(hooks):
    """A class would keep our wrapper, or gain an attribute it only inherited."""

    class Child(Greeter):
        pass

    greeter = Greeter()
    greeter.greet = lambda name: f"bye {name}"
    before = (dict(vars(Greeter)), dict(vars(Child)), dict(vars(greeter)))
    for target in (Greeter, Child, greeter):
        label(hooks, target)
    hooks.close()
    hooks.close()
    assert (dict(vars(Greeter)), dict(vars(Child)), dict(vars(greeter))) == before


def test_a_later_patch_of_somebody_else_survives(hooks):
    """Closing would throw away the wrapper that another tool put over ours."""

    class Mine(Greeter):
        pass

    calls = []
    label(hooks, Mine, after=calls.append)
    ours = Mine.greet
    Mine.greet = lambda self, name: ours(self, name).upper()
    hooks.close()
    assert Mine().greet("you") == "HELLO YOU"
    assert calls == []


@pytest.mark.parametrize("broken", ["find", "after"])
def test_a_failure_stays_inside(hooks, broken, caplog):
    """An exception of ours would reach the caller, lose the result, or be repeated at every call."""

    class Mine(Greeter):
        pass

    def fail(*_):
        raise ValueError("ours")

    label(hooks, Mine, **{broken: fail})
    assert [Mine().greet("you") for _ in range(3)] == ["hello you"] * 3
    assert hooks.failure == "ValueError: ours"
    assert len(caplog.records) == 1
    hooks.close()


def test_the_originals_exception_passes(hooks):
    """An exception of the training job would be swallowed, or the label stay open."""

    class Mine:
        def greet(self):
            raise KeyError("theirs")

    label(hooks, Mine)
    with pytest.raises(KeyError, match="theirs"):
        Mine().greet()
    assert native.load().stack_depth() == 0
    assert not hooks.failure
    hooks.close()


def test_undone_last_in_first_out(hooks):
    """Two patches of one attribute would leave the first one behind."""
    original = Greeter.greet
    for _ in range(2):
        label(hooks, Greeter)
    hooks.close()
    assert Greeter.greet is original


def greeter_of_its_own():
    """An object with a method of its own, which holds the object, as memory trackers leave them behind."""
    greeter = Greeter()
    greeter.greet = lambda name: f"bye {name} of {type(greeter).__name__}"
    return greeter


def label_own(hooks, greeter, after=None):
    """Patches the object's own method by a native label call."""
    engine = native.load()

    def make(original):
        return engine.make_label_call(
            original, lambda _: engine.make_target(0), after, hooks.fail, int(RefType.ALL_GATHER), -1, -1
        )

    hooks.patch_own(greeter, "greet", make)


def test_an_objects_own_method_is_labelled_and_given_back(hooks):
    """A method that one object has of its own would be called with the wrong arguments, or not come back."""
    seen, greeter = [], greeter_of_its_own()
    before = dict(vars(greeter))
    label_own(hooks, greeter, seen.append)
    hooks.labeler = "another"
    label_own(hooks, greeter, seen.append)
    assert greeter.greet("you") == "bye you of Greeter"
    assert seen == [greeter, greeter]
    hooks.close()
    assert vars(greeter) == before
    assert greeter.greet("you") == "bye you of Greeter"


def test_an_object_whose_own_method_is_labelled_can_go(hooks):
    """A sharded model that the job drops would live on, with all its memory, for as long as it is watched."""
    greeter = greeter_of_its_own()
    label_own(hooks, greeter)
    assert greeter.greet("you") == "bye you of Greeter"
    gone = weakref.ref(greeter)
    del greeter
    gc.collect()
    assert gone() is None
    hooks.close()
    assert not hooks.failure


def test_an_objects_own_method_that_somebody_wrapped_passes_through(hooks):
    """After close() a tool that wrapped the method meanwhile would still label, or fail."""
    seen, greeter = [], greeter_of_its_own()
    label_own(hooks, greeter, seen.append)
    ours = greeter.greet
    greeter.greet = lambda name: ours(name).upper()
    hooks.close()
    assert greeter.greet("you") == "BYE YOU OF GREETER"
    assert seen == []


def test_a_part_that_cannot_be_switched_off_costs_only_itself(hooks, caplog):
    """One part that fails on the way out would leave every patch on torch, or reach the training loop."""

    class Mine(Greeter):
        def greet(self, name):
            return name

    def fail():
        raise ValueError("ours")

    before = dict(vars(Mine))
    label(hooks, Mine)
    hooks.on_off(fail)
    hooks.close()
    assert dict(vars(Mine)) == before
    assert "cannot be switched off" in caplog.text


def test_a_hook_that_fails_because_it_was_closed_is_silent(hooks, caplog):
    """Closing while another thread trains would be reported as a failure of torchmem's."""

    def close_and_fail():
        hooks.close()
        raise AttributeError("gone")

    hooks.guarded(close_and_fail)()
    assert not hooks.failure
    assert caplog.records == []


class TimeIsUp(Exception):  # noqa: N818
    """What the job's alarm raises."""


class Job:
    def raise_it(self, *_):
        raise TimeIsUp("theirs")

    def on_alarm(self, *args):
        self.raise_it(*args)


def on_alarm(*_):
    raise TimeIsUp("theirs")


@pytest.fixture
def install():
    """Installs a handler for SIGALRM until the test is over."""
    before = signal.getsignal(signal.SIGALRM)
    yield functools.partial(signal.signal, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "handler",
    [
        on_alarm,
        Job().on_alarm,
        functools.partial(on_alarm, 1),
        functools.partial(functools.partial(Job().on_alarm, 1), 2),
    ],
    ids=["function", "method", "partial", "partial of a method"],
)
def test_what_a_signal_handler_raises_inside_a_hook_reaches_the_job(hooks, install, handler):
    """A job's own time limit would be swallowed when it fires inside one of our hooks, and cost us the labeler."""
    install(handler)
    with pytest.raises(TimeIsUp, match="theirs"):
        hooks.guarded(lambda: signal.raise_signal(signal.SIGALRM))()
    assert hooks.active


@pytest.mark.parametrize("handler", [on_alarm, signal.SIG_IGN, print], ids=["function", "constant", "builtin"])
def test_a_hook_that_fails_under_a_signal_handler_fails_alone(hooks, install, handler):
    """In a job that has signal handlers every failure of ours would reach the training loop."""

    def fail():
        raise ValueError("ours")

    install(handler)
    hooks.guarded(fail)()
    assert hooks.failure == "ValueError: ours"
