"""Builds and loads the native engine: the allocation tap and its ledger, compiled from the sources beside this package.

Invariants: a binary is only ever loaded into the torch version it was compiled against (the slot of the CUDA
allocator's virtual method and the return type of autograd's ``get_current_node`` move between minor versions, and a
mismatch would load and misbehave). Every failure is a ``BuildError`` of one line that names the reason and the fix.

Limits: those of ``engine.build``; not ROCm builds of torch.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from torchmem.engine import build as builder
from torchmem.errors import BuildError
from torchmem.model import RefType

MODULE_NAME = "torchmem_native"
MIN_TORCH = (2, 11)
SOURCE_DIR = Path(__file__).resolve().parent.parent / "native"
UNITS = ("tap.cpp", "cpu_allocator.cpp", "relabel.cpp", "cuda_source.cpp", "ddp_buckets.cpp", "bindings.cpp")

_loaded: Any = None


def load() -> Any:
    """The compiled engine's module, built first where it is not there yet.

    Raises:
        BuildError: it cannot be built or must not be loaded.
    """
    global _loaded  # noqa: PLW0603  # one process has one engine: its state is the process's allocator
    if _loaded is None:
        _loaded = _load(build())
    return _loaded


def build() -> Path:
    """Compiles the engine unless the cache has it; returns the path of the binary.

    Raises:
        BuildError: naming the reason and the fix.
    """
    torch = supported_torch()
    sources = [path for path in SOURCE_DIR.rglob("*") if path.is_file()]
    return builder.cached(MODULE_NAME, sources, torch, lambda scratch, binary: _compile(torch, scratch, binary))


def supported_torch() -> Any:
    """torch, imported.

    Raises:
        BuildError: it is missing, too old, or of a kind that the engine does not know.
    """
    try:
        import torch
    except ImportError as error:
        raise BuildError(f"torch cannot be imported ({error}): install it first") from None
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        raise BuildError(f"torch {torch.__version__} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}: upgrade torch")
    if torch.version.hip:
        raise BuildError("ROCm builds of torch are not supported yet")
    return torch


def _compile(torch: Any, scratch: str, binary: Path) -> None:
    compiler = builder.compiler()
    python_include = sysconfig.get_paths()["include"]
    if not (Path(python_include) / "Python.h").exists():
        raise BuildError(f"{python_include}/Python.h is missing: install Python's headers (Debian: python3-dev)")
    flags = [
        *builder.torch_flags(torch),
        f"-I{python_include}",
        f"-I{SOURCE_DIR}/cuda_stub",
        *("-idirafter", f"{SOURCE_DIR}/cuda_stub/after"),
    ]
    objects = [f"{scratch}/{Path(unit).stem}.o" for unit in UNITS]
    builder.run_all(
        [[compiler, *flags, "-c", str(SOURCE_DIR / unit), "-o", o] for unit, o in zip(UNITS, objects, strict=True)]
    )
    libraries = [f"-L{Path(torch.__file__).parent}/lib", "-lc10", "-ltorch_cpu"]
    builder.run_all([[compiler, "-shared", *objects, "-o", str(binary), *libraries]])


def _load(binary: Path) -> Any:
    import torch

    try:
        loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(binary))
        spec = importlib.util.spec_from_file_location(MODULE_NAME, str(binary), loader=loader)
        if spec is None:
            raise BuildError(f"{binary} cannot be loaded as an extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{binary} cannot be loaded ({error}): delete it and try again") from None
    built_for = str(module.TORCH_VERSION).split(".")[:2]
    if built_for != torch.__version__.split(".")[:2]:
        raise BuildError(f"{binary} was built for torch {module.TORCH_VERSION}, not {torch.__version__}: delete it")
    if len(RefType) != module.NUM_REFTYPES:
        raise BuildError(f"{binary} knows {module.NUM_REFTYPES} reftypes, this library {len(RefType)}: delete it")
    return module
