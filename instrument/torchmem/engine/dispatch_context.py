"""Whose is what a thread allocates now, and what for: the rules of the native tap, in Python.

A thread's *context* is what it is doing (its stack in the ledger) and its *timeline*: which module was running when
which autograd node was made, so that in backward the running node tells the module. Rules and names are those of
``native/tap.cpp`` and ``native/context.h``; read them together.

Limits: Python cannot ask a node which thread made it, so a node is looked for in the timeline of the thread that runs
backward, then in the one that noted last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, NamedTuple

import torch

from torchmem.engine.fast_ledger import FastLedger
from torchmem.ledger import NO_TASK, FrameKind
from torchmem.model import OUTSIDE_OWNER, Phase, RefType

_NO_NUMBER = (1 << 64) - 1
"""The sequence number of a node that has none: AccumulateGrad."""

_ROOT = 1

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001  # the only way to ask
_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001  # as above


class Label(NamedTuple):
    """What a new block is booked as."""

    owner: int
    reftype: int


@dataclass(slots=True)
class Timeline:
    """Owners by the sequence number at which each began to run; numbers only grow."""

    numbers: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def note(self, number: int, owner: int) -> None:
        """From this number on the owner runs."""
        if self.numbers and self.numbers[-1] == number:
            self.owners[-1] = owner
            return
        self.numbers.append(number)
        self.owners.append(owner)

    def owner_at(self, number: int) -> int:
        """Who ran when the node of this number was made."""
        index = bisect_right(self.numbers, number)
        return self.owners[index - 1] if index else OUTSIDE_OWNER

    def clear(self) -> None:
        """Forgets everything."""
        self.numbers.clear()
        self.owners.clear()


@dataclass(slots=True)
class Context:
    """What is remembered of a thread."""

    stack: int
    timeline: Timeline = field(default_factory=Timeline)
    last_number: int = -1
    last_owner: int = OUTSIDE_OWNER
    after_forward: bool = False
    """Between the root's forward and backward: the loss."""
    checkpoint: int = 0
    """Stack depth with the frame of the running operation on a checkpoint; 0 where there is none."""


class Contexts:
    """The contexts of all threads, over one ledger; the caller keeps the ledger's lock."""

    def __init__(self, ledger: FastLedger) -> None:
        self.phases = Phase.OTHER
        self._ledger = ledger
        self._by_thread: dict[int, Context] = {}
        self._noted_last: Timeline | None = None

    def current(self) -> Context:
        """The calling thread's."""
        thread = get_ident()
        context = self._by_thread.get(thread)
        if context is None:
            context = self._by_thread[thread] = Context(thread)
            self._ledger.stacks.setdefault(thread, [])
        return context

    def label(self, context: Context) -> Label:
        """What the thread's next block is booked as."""
        task = graph_task()
        ledger = self._ledger
        frames = ledger.stacks[context.stack]
        if frames:
            ledger.settle(context.stack, task)
        if context.checkpoint and self.in_checkpoint(context):
            return Label(OUTSIDE_OWNER, RefType.CHECKPOINT)
        if frames:
            top = frames[-1]
            # A backward run inside (by an optimizer's closure, by reentrant checkpointing) has labels of its own.
            if top.kind == FrameKind.LABEL and top.task == task:
                return Label(top.owner, top.reftype)
            if top.kind == FrameKind.FORWARD:
                if task == NO_TASK:
                    return Label(top.owner, RefType.ACTIVATION)
                if top.task == task:
                    return Label(top.owner, RefType.RECOMPUTATION)
        if task != NO_TASK:
            context.after_forward = False
            self.phases |= Phase.BACKWARD
            owner = self.node_owner(context)
            ledger.enter_backward(context.stack, owner, task)
            return Label(owner, RefType.TEMPORARY)
        return Label(OUTSIDE_OWNER, RefType.ACTIVATION if context.after_forward else RefType.OTHER)

    def node_owner(self, context: Context) -> int:
        """The module that made the autograd node that runs; the last one again where the node has no number."""
        node = _node()
        number = getattr(node, "_sequence_nr", _no_number)()
        if number in (_NO_NUMBER, context.last_number):
            return context.last_owner
        timeline = context.timeline
        if not timeline.numbers and self._noted_last is not None:
            timeline = self._noted_last
        context.last_number = number
        context.last_owner = timeline.owner_at(number)
        return context.last_owner

    def note(self, context: Context, owner: int) -> None:
        """The owner runs on this thread from here on."""
        context.timeline.note(_next_number(), owner)
        self._noted_last = context.timeline

    def enclosing_module(self, context: Context) -> int:
        """Whose forward runs, innermost."""
        for frame in reversed(self._ledger.stacks[context.stack]):
            if frame.kind == FrameKind.FORWARD:
                return frame.owner
        return OUTSIDE_OWNER

    def in_checkpoint(self, context: Context) -> bool:
        """Whether a checkpoint is being saved or loaded on the thread."""
        if context.checkpoint:
            frames = self._ledger.stacks[context.stack]
            depth = context.checkpoint
            if len(frames) < depth or frames[depth - 1].reftype != RefType.CHECKPOINT:
                context.checkpoint = 0
        return context.checkpoint != 0

    def phase(self, context: Context) -> Phase:
        """What the thread is doing; the loss counts as forward."""
        if self.in_checkpoint(context):
            return Phase.CHECKPOINT
        if graph_task() != NO_TASK:
            return Phase.BACKWARD
        for frame in reversed(self._ledger.stacks[context.stack]):
            if frame.kind == FrameKind.FORWARD:
                return Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
            # So does the optimizer labeler mark a step.
            if frame.kind == FrameKind.LABEL and (frame.owner, frame.reftype) == (OUTSIDE_OWNER, RefType.TEMPORARY):
                return Phase.OPTIMIZER
        return Phase.FORWARD if context.after_forward else Phase.OTHER

    def enter_module(self, owner: int) -> None:
        """A watched module's forward begins."""
        context, task = self.current(), graph_task()
        if owner == _ROOT:
            self.phases |= Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
        self._ledger.settle(context.stack, task)
        self._ledger.push(context.stack, owner, FrameKind.FORWARD, 0, task)
        self.note(context, owner)

    def leave_module(self, owner: int) -> None:
        """It ends; what was left open inside of it ends too."""
        context = self.current()
        frames = self._ledger.stacks[context.stack]
        depth = len(frames)
        while depth and not (frames[depth - 1].kind == FrameKind.FORWARD and frames[depth - 1].owner == owner):
            depth -= 1
        if not depth:
            self._ledger.counters["num_unmatched_pops"] += 1
            return
        while len(frames) >= depth:
            self._ledger.pop(context.stack)
        outer = self.enclosing_module(context)
        self.note(context, outer)
        if outer == OUTSIDE_OWNER and graph_task() == NO_TASK:
            context.after_forward = torch.is_grad_enabled()

    def end_step(self) -> Phase:
        """Forgets what belonged to the step; returns the phases it held."""
        phases, self.phases = self.phases, Phase.OTHER
        for context in self._by_thread.values():
            context.after_forward = False
            if self.in_checkpoint(context):
                self.phases |= Phase.CHECKPOINT  # one that is saved in the background spans steps
        return phases

    def clear_timelines(self) -> None:
        """Forgets who made which autograd node: the owners have changed."""
        for context in self._by_thread.values():
            context.timeline.clear()
            context.last_number, context.last_owner, context.after_forward = -1, OUTSIDE_OWNER, False


def _no_number() -> int:
    return _NO_NUMBER


def _next_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # noqa: SLF001  # as above
    return number
