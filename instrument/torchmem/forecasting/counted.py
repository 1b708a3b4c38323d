"""The labelers of a running job, on the dispatch engine: ``Counting`` with its engine exchanged.

Invariants: those of ``Counting``; the engine is started and stopped by whoever made it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchmem.counting import Counting
from torchmem.errors import InstallError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchmem.engine.dispatch import DispatchEngine


class DispatchCounting(Counting):
    """A dispatch engine, the table of owners and the labelers of one model.

    Args:
        engine: what counts; it may have counted before.
        model: the root module.
        optimizer: its optimizer; None for the first that trains it.
        depth: how deep modules are told apart.
    """

    def __init__(self, engine: DispatchEngine, model: nn.Module, optimizer: Optimizer | None, *, depth: int) -> None:
        super().__init__(model, optimizer, depth=depth, on_step=_nothing, before_forward=_nothing)
        self._engine = engine

    def attach(self) -> None:
        """Names what exists, and what is made from here on; once."""
        from torchmem.labelers.owners import OwnerTable

        if self._subject is None:
            raise InstallError("a Counting attaches once: make another")
        model, optimizer = self._subject
        self._subject = None
        self.native = self._engine
        self.owners = OwnerTable(model, self._depth)
        self._engine.set_parents(self.owners.parents)
        for labeler in self._make_labelers(model, optimizer):
            self.labelers.append(labeler)  # first: one that is interrupted must be detached too
            try:
                labeler.attach()
            except Exception as error:  # noqa: BLE001  # a torch that changed costs one labeler, not the forecast
                labeler.hooks.fail(error)


def _nothing(*_arguments: object) -> None:
    """Steps are ended by whoever runs them."""
