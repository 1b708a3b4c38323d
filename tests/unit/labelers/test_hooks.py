"""HookSet: what is put on comes off again, and what fails stays inside."""

from __future__ import annotations

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
