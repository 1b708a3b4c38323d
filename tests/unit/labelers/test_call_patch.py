"""CallPatch: off the class while torch traces, and off for good once it is closed, whatever is interrupted by that."""

from __future__ import annotations

import pytest
from torch import nn
from torch._dynamo import convert_frame, functional_export
from torch._dynamo.callback import callback_handler

from interrupts import at_every_point
from torchmem.labelers import call_patch
from torchmem.labelers.call_patch import CallPatch
from torchmem.labelers.hooks import HookSet


def wrapper(original, _compiled_type):
    def call(self, /, *args, **kwargs):
        return original(self, *args, **kwargs)

    return call


def touched():
    """All that the patch replaces, under the names by which torch finds it."""
    return (
        vars(nn.Module)["__call__"],
        vars(callback_handler).get("install_callbacks"),
        getattr(convert_frame, "fullgraph_capture", None),
        functional_export.fullgraph_capture,
    )


@pytest.fixture
def hooks():
    hooks, before = HookSet("test"), touched()
    yield hooks
    hooks.close()
    assert touched() == before


def test_a_signal_handler_may_close_anywhere():
    """A job that closes the monitor on SIGTERM would hang, or keep the wrapper for good."""
    before = touched()
    for at_point in at_every_point(call_patch.__file__):
        hooks = HookSet("test")
        CallPatch(hooks, wrapper)
        with at_point(hooks.close), callback_handler.install_callbacks(None, "0"):
            pass
        hooks.close()
        assert touched() == before


def test_the_wrapper_comes_back_when_a_capture_is_over(hooks):
    """Who exports the model once would see nothing of its modules from then on."""
    original = vars(nn.Module)["__call__"]
    CallPatch(hooks, wrapper)
    patched = vars(nn.Module)["__call__"]
    for module in (convert_frame, functional_export):
        with pytest.raises(RuntimeError, match="Unsupported model code"):
            module.fullgraph_capture(None, ())  # fails, as a model does that cannot be captured
        assert vars(nn.Module)["__call__"] is patched is not original


def test_a_torch_without_capture_is_watched(hooks, monkeypatch):
    """Another torch, which exports in other ways, would lose the labeler over it."""
    monkeypatch.delattr(convert_frame, "fullgraph_capture")
    original = vars(nn.Module)["__call__"]
    CallPatch(hooks, wrapper)
    assert vars(nn.Module)["__call__"] is not original
    hooks.close()
    assert not hasattr(convert_frame, "fullgraph_capture")
