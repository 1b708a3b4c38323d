"""The exceptions torchmem raises to its caller, all under one root, each message naming the fix.

Invariant: none of them is ever raised inside the training loop; they come from calls the user makes on purpose
(``install``, ``build``, reading a record) and from the command line.
"""

from __future__ import annotations


class TorchmemError(Exception):
    """Root of every exception that torchmem raises."""


class ConfigError(TorchmemError):
    """A setting has a value that cannot be used."""


class InstallError(TorchmemError):
    """``install`` was called on something that cannot be watched."""


class BuildError(TorchmemError):
    """The native engine could not be compiled or loaded; the message carries the compiler's reason."""


class RecordError(TorchmemError):
    """A record cannot be read.

    Attributes:
        reason: one lower-snake-case word for counting, such as ``truncated`` or ``version``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StoreError(TorchmemError):
    """The record directory cannot be used, or another live process already holds this rank's record."""


class ForecastError(TorchmemError):
    """A job cannot be forecast: it does something that fake tensors cannot, or a saved forecast cannot be read."""
