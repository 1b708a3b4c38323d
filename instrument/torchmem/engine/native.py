"""Builds and loads the native engine: the allocation tap and its ledger, compiled from the sources beside this package.

The binary is made once per (sources, torch build, Python ABI) into a cache folder: under a file lock, so that the
ranks of a host build it once; in a private folder and renamed into place, so that an interrupted build leaves nothing
half-made; never loaded unless the folder is the user's own.

Invariants: a binary is only ever loaded into the torch version it was compiled against (the slot of the CUDA
allocator's virtual method and the return type of autograd's ``get_current_node`` move between minor versions, and a
mismatch would load and misbehave). Every failure is a ``BuildError`` of one line that names the reason and the fix.

Limits: Linux, g++ or clang++ with C++17; not ROCm builds of torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchmem.errors import BuildError
from torchmem.model import RefType

MODULE_NAME = "torchmem_native"
MIN_TORCH = (2, 11)
COMPILE_TIMEOUT_SECONDS = 600
SOURCE_DIR = Path(__file__).resolve().parent.parent / "native"
UNITS = ("tap.cpp", "cuda_source.cpp", "bindings.cpp")

_loaded: Any = None


def cache_dir() -> Path:
    """The folder for compiled engines: ``$TORCHMEM_CACHE_DIR``, else the user's cache, else a temporary one."""
    if chosen := os.environ.get("TORCHMEM_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118  # Path.home() raises where there is none
    if os.path.isabs(base) and _can_make(Path(base) / "torchmem"):  # noqa: PTH117  # same
        return Path(base) / "torchmem"
    return Path(tempfile.gettempdir()) / f"torchmem-cache-{os.geteuid()}"


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
    torch = _supported_torch()
    folder = _own_folder(cache_dir())
    binary = folder / f"{MODULE_NAME}-{_key(torch)}.so"
    if binary.exists():
        return binary
    with _locked(folder / "build.lock"):
        if not binary.exists():  # another rank may have made it meanwhile
            _clean(folder)
            _compile(torch, folder, binary)
    return binary


def _supported_torch() -> Any:
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


def _can_make(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK | os.X_OK)
    return False


def _own_folder(folder: Path) -> Path:
    """Makes the folder; refuses one where another user could place a binary."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"{folder}: {error.strerror}: set TORCHMEM_CACHE_DIR to a folder you can write") from None
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others: chmod go-w it, or set TORCHMEM_CACHE_DIR")
    return folder


def _key(torch: Any) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCE_DIR.rglob("*")):
        if source.is_file():
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for part in (torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), torch.__file__):
        digest.update(str(part).encode() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel drops the lock when the holder dies, so a killed build blocks nobody.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clean(folder: Path) -> None:
    """Removes what interrupted builds left; the caller holds the lock, so nobody is using it."""
    for leftover in folder.glob("build-*/"):
        shutil.rmtree(leftover, ignore_errors=True)


def _compile(torch: Any, folder: Path, binary: Path) -> None:
    compiler = _compiler()
    python_include = sysconfig.get_paths()["include"]
    if not (Path(python_include) / "Python.h").exists():
        raise BuildError(f"{python_include}/Python.h is missing: install Python's headers (Debian: python3-dev)")
    torch_dir = Path(torch.__file__).parent
    flags = [
        *("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{python_include}",
        f"-I{torch_dir}/include",
        f"-I{torch_dir}/include/torch/csrc/api/include",
        f"-I{SOURCE_DIR}/cuda_stub",
        *("-idirafter", f"{SOURCE_DIR}/cuda_stub/after"),
    ]
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        objects = [f"{scratch}/{Path(unit).stem}.o" for unit in UNITS]
        _run_all(
            [[compiler, *flags, "-c", str(SOURCE_DIR / unit), "-o", o] for unit, o in zip(UNITS, objects, strict=True)]
        )
        made = f"{scratch}/{binary.name}"
        _run_all([[compiler, "-shared", *objects, "-o", made, f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu"]])
        Path(made).replace(binary)


def _compiler() -> str:
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and shutil.which(candidate):
            return candidate
    raise BuildError(
        "no C++ compiler found: install g++, or run `torchmem build` where there is one and share the cache"
    )


def _run_all(commands: list[list[str]]) -> None:
    """Runs the commands side by side; the first failure ends all."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = subprocess.Popen(  # noqa: S603  # the user's own compiler
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
            )
            running.append(process)
        for process in running:
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT_SECONDS)
            if process.returncode:
                raise BuildError(f"{commands[0][0]} failed: {_reason(output, process.returncode)}")
    except OSError as error:
        raise BuildError(f"cannot run the compiler: {error}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {COMPILE_TIMEOUT_SECONDS} s") from None
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _reason(output: str, status: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else f"exit status {status}")


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
