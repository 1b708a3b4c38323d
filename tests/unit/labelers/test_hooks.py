"""HookSet: what is put on comes off again, and what fails stays inside."""

from __future__ import annotations

import pytest

from torchmem.labelers.hooks import HookSet


class Greeter:
    def greet(self, name):
        return f"hello {name}"


@pytest.fixture
def hooks():
    return HookSet("test")


def test_patch_runs_around_the_original(hooks):
    """The original would run twice, not at all, or with other arguments."""
    seen = []
    hooks.patch(Greeter, "greet", lambda *args: seen.append(args) or "token", lambda *args: seen.append(args))
    greeter = Greeter()
    assert greeter.greet("you") == "hello you"
    assert seen == [(greeter, "you"), ("token", greeter, "you")]
    hooks.close()


def test_close_restores_what_was_there(hooks):
    """A class would keep our wrapper, or gain an attribute it only inherited."""

    class Child(Greeter):
        pass

    greeter = Greeter()
    greeter.greet = lambda name: f"bye {name}"
    before = (dict(vars(Greeter)), dict(vars(Child)), dict(vars(greeter)))
    for target in (Greeter, Child, greeter):
        hooks.patch(target, "greet", lambda *_: None, lambda *_: None)
    hooks.close()
    hooks.close()
    assert (dict(vars(Greeter)), dict(vars(Child)), dict(vars(greeter))) == before


def test_a_later_patch_of_somebody_else_survives(hooks):
    """Closing would throw away the wrapper that another tool put over ours."""

    class Mine(Greeter):
        pass

    calls = []
    hooks.patch(Mine, "greet", lambda *_: calls.append(1), lambda *_: None)
    ours = Mine.greet
    Mine.greet = lambda self, name: ours(self, name).upper()
    hooks.close()
    assert Mine().greet("you") == "HELLO YOU"
    assert calls == []


@pytest.mark.parametrize("broken", ["before", "after"])
def test_a_failure_stays_inside(hooks, broken, caplog):
    """An exception of ours would reach the caller, lose the result, or be repeated at every call."""

    class Mine(Greeter):
        pass

    def fail(*_):
        raise ValueError("ours")

    def fine(*_):
        return None

    hooks.patch(Mine, "greet", fail if broken == "before" else fine, fail if broken == "after" else fine)
    assert [Mine().greet("you") for _ in range(3)] == ["hello you"] * 3
    assert hooks.failure == "ValueError: ours"
    assert len(caplog.records) == 1
    hooks.close()


def test_the_originals_exception_passes(hooks):
    """An exception of the training job would be swallowed, or the label stay open."""

    class Mine:
        def greet(self):
            raise KeyError("theirs")

    closed = []
    hooks.patch(Mine, "greet", lambda *_: None, lambda *_: closed.append(1))
    with pytest.raises(KeyError, match="theirs"):
        Mine().greet()
    assert closed == [1]
    assert not hooks.failure
    hooks.close()


def test_undone_last_in_first_out(hooks):
    """Two patches of one attribute would leave the first one behind."""
    original = Greeter.greet
    for _ in range(2):
        hooks.patch(Greeter, "greet", lambda *_: None, lambda *_: None)
    hooks.close()
    assert Greeter.greet is original
