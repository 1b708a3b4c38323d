"""From the address of a C++ tensor, by which labelers name one to an engine, to its storage and its Python object.

The native engine follows C++ pointers; here two fields of torch's ``TensorImpl`` are read, at offsets that are found
out by looking at tensors whose answers are known.

Invariant: an offset is only used after it fitted every kind of tensor tried, so a torch that lays out its tensors
otherwise is refused, not misread.

Limits: the tensor at an address must be alive, as it is while its caller holds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from torchmem.errors import BuildError

_WORD_BYTES = 8
_SEARCHED_BYTES = 256


class _Offsets(NamedTuple):
    storage: int
    python_object: int


def storage_address(tensor_address: int) -> int:
    """The address of the storage behind the tensor at an address; 0 where it has none."""
    return _word(tensor_address + _offsets().storage)


def tensor_at(tensor_address: int) -> Any:
    """The Python object of the tensor at an address; None where it has none."""
    found = _word(tensor_address + _offsets().python_object)
    return ctypes.cast(found, ctypes.py_object).value if found else None


def check() -> None:
    """Makes sure that both functions work with this torch.

    Raises:
        BuildError: they do not.
    """
    _offsets()


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@lru_cache(maxsize=1)
def _offsets() -> _Offsets:
    samples = [torch.empty(3), torch.nn.Parameter(torch.empty(2, 2)), torch.empty(6).view(2, 3), torch.empty(0)]
    return _Offsets(
        _found("storage", samples, lambda tensor: tensor.untyped_storage()._cdata),  # noqa: SLF001  # the address of the StorageImpl
        _found("Python object", samples, id),
    )


def _found(what: str, samples: list[torch.Tensor], wanted: Callable[[torch.Tensor], int]) -> int:
    fitting = [
        offset
        for offset in range(0, _SEARCHED_BYTES, _WORD_BYTES)
        if all(_word(tensor._cdata + offset) == wanted(tensor) for tensor in samples)  # noqa: SLF001  # the address of the TensorImpl
    ]
    if len(fitting) != 1:
        raise BuildError(f"the dispatch engine does not know torch {torch.__version__}: no {what} in its tensors")
    return fitting[0]
