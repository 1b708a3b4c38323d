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


def label(hooks, target, *, enter=lambda *_: 0, leave=lambda _: None, after=None):
    """Patches ``target.greet`` the way labelers do."""
    hooks.patch(target, "greet", lambda original: hooks.labelled(original, enter, leave, after))


def test_patch_runs_around_the_original(hooks):
    """The original would run twice, not at all, or with other arguments."""
    seen = []
    label(
        hooks,
        Greeter,
        enter=lambda *args: seen.append(args) or 7,
        leave=seen.append,
        after=lambda *args: seen.append(args),
    )
    greeter = Greeter()
    assert greeter.greet("you") == "hello you"
    assert seen == [(greeter, "you"), 7, (greeter, "you")]
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
    label(hooks, Mine, enter=lambda *_: calls.append(1) or 0)
    ours = Mine.greet
    Mine.greet = lambda self, name: ours(self, name).upper()
    hooks.close()
    assert Mine().greet("you") == "HELLO YOU"
    assert calls == []


@pytest.mark.parametrize("broken", ["enter", "after"])
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

    closed = []
    label(hooks, Mine, leave=closed.append)
    with pytest.raises(KeyError, match="theirs"):
        Mine().greet()
    assert closed == [0]
    assert not hooks.failure
    hooks.close()


def test_undone_last_in_first_out(hooks):
    """Two patches of one attribute would leave the first one behind."""
    original = Greeter.greet
    for _ in range(2):
        label(hooks, Greeter)
    hooks.close()
    assert Greeter.greet is original
