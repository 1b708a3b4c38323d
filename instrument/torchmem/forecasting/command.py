"""The command line of ``torchmem forecast``.

Invariants: importing this imports no torch; a job that cannot be forecast is one line on stderr and status 1, arguments
that make no sense are status 2. Progress goes to stderr, where that is a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchmem.command_line import complain, print_drawn, print_json, whole
from torchmem.errors import TorchmemError

if TYPE_CHECKING:
    from torchmem.forecasting.outcome import Forecast, Plain

BAD_ARGUMENTS = 2
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

EPILOG = """\
FUNCTION returns (model, optimizer or None, step to call). Where it has such parameters it is given mesh, device, rank
and world_size; --set and --sweep give others.

example:
  torchmem forecast train.py:build --world-size 1024 --ranks 0,last --capacity 80GiB
  torchmem forecast jobs.llama:build --world-size 64 --mesh dp=8,tp=8 --sweep batch=1,2,4,8 --capacity 80GiB
  torchmem forecast train.py:build --allocator cuda --save forecast.json
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser of ``torchmem``."""
    help_text = "say what each rank of a job will hold, before it starts and without its hardware"
    parser = commands.add_parser(
        "forecast",
        help=help_text,
        description=f"{help_text.capitalize()}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="a module's name or a file, and a function in it")
    parser.add_argument("--world-size", metavar="N", type=whole(1), help="ranks of the job (default: 1, or the mesh's)")
    parser.add_argument("--mesh", metavar="NAME=N,...", type=_mesh, default={}, help="dimensions of the device mesh")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device to forecast for (default: cpu)"
    )
    parser.add_argument(
        "--allocator",
        choices=("exact", "cuda"),
        help="sizes as requested, or as CUDA's caching allocator rounds them (default: that of the device)",
    )
    parser.add_argument(
        "--ranks", metavar="RANK,...", type=_ranks, default=["0"], help="which ranks; `last` is one (default: 0)"
    )
    parser.add_argument(
        "--set", metavar="NAME=VALUE", type=_assignment, action="append", default=[], help="an argument of the function"
    )
    parser.add_argument("--sweep", metavar="NAME=V,V,...", type=_sweep, help="forecast each value of an argument")
    parser.add_argument("--capacity", metavar="SIZE", type=size_bytes, help="memory of the device, such as 80GiB")
    parser.add_argument("--depth", metavar="N", type=whole(1), default=2, help="how deep modules are told apart")
    parser.add_argument("--top", metavar="N", type=whole(1), default=10, help="modules shown (default: 10)")
    parser.add_argument(
        "--unfold", action="store_true", help="show each layer apart instead of summing them as layers.*"
    )
    parser.add_argument("--save", metavar="FILE", type=Path, help="write the forecast to a file")
    parser.add_argument("--json", action="store_true", help="the forecast as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit status: 1 where the job cannot be forecast or does not fit."""
    try:
        function = find_function(arguments.function)
        world_size = arguments.world_size or _product(arguments.mesh)
        ranks = [world_size - 1 if rank == "last" else int(rank) for rank in arguments.ranks]
    except _UsageError as error:
        complain(str(error))
        return BAD_ARGUMENTS
    swept = arguments.sweep
    given = dict(arguments.set)
    if swept and arguments.save:
        complain("--save keeps one forecast: leave out --sweep")
        return BAD_ARGUMENTS
    try:
        from torchmem.forecasting.job import forecast

        with _progress(num_stages=3 * len(ranks) * (len(swept[1]) if swept else 1)) as on_stage:

            def forecast_with(more: dict[str, Plain]) -> Forecast:
                return forecast(
                    function,
                    world_size=world_size,
                    ranks=ranks,
                    mesh=arguments.mesh,
                    device=arguments.device,
                    allocator=arguments.allocator,
                    depth=arguments.depth,
                    arguments=given | more,
                    on_stage=on_stage,
                )

            if swept:
                from torchmem.forecasting.sweep import sweep

                result: Any = sweep(swept[0], swept[1], lambda v: forecast_with({swept[0]: v}), arguments.capacity)
            else:
                result = forecast_with({})
        if arguments.save:
            result.save(arguments.save)
    except TorchmemError as error:
        complain(str(error))
        return 1
    _print(result, arguments)
    return 0 if _is_good(result, arguments) else 1


def _is_good(result: Any, arguments: argparse.Namespace) -> bool:
    if arguments.capacity is None:
        return True
    return result.largest_fit is not None if arguments.sweep else result.peak_bytes <= arguments.capacity


def _print(result: Any, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(_as_data(result, arguments))
        return
    from torchmem.forecasting import show

    capacity, top, fold = arguments.capacity, arguments.top, not arguments.unfold
    if arguments.sweep:
        print_drawn(lambda console: show.draw_sweep(console, result, capacity))
    else:
        print_drawn(lambda console: show.draw(console, result, capacity_bytes=capacity, top=top, fold=fold))


def _as_data(result: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    from torchmem.forecasting.advice import candidates
    from torchmem.forecasting.outcome import as_data

    capacity = arguments.capacity
    if arguments.sweep:
        points = [{"value": value, **as_data(forecast)} for value, forecast in result.points]
        fit = {"largest_fit": result.largest_fit, "is_exact": result.is_exact} if capacity is not None else {}
        return {"argument": result.name, "capacity_bytes": capacity, **fit, "points": points}
    data = as_data(result)
    if capacity is not None:
        shrink = [one._asdict() for one in candidates(result.highest, capacity)]
        data |= {"capacity_bytes": capacity, "fits": result.peak_bytes <= capacity, "shrink": shrink}
    return data


@contextlib.contextmanager
def _progress(num_stages: int) -> Iterator[Callable[[str], None]]:
    """A bar of the stages on stderr, where somebody looks; a search may take more stages than were foreseen."""
    if not sys.stderr.isatty():
        yield lambda _stage: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=num_stages)
        done = -1

        def on_stage(stage: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=stage, completed=done, total=max(num_stages, done + 1))

        yield on_stage


class _UsageError(Exception):
    """An argument names something that is not there; one line."""


def find_function(text: str) -> Callable[..., Any]:
    """The function of ``MODULE:FUNCTION``, where the module is a name or a file; the working folder is searched."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise _UsageError(f"{text!r} is not MODULE:FUNCTION")
    module = _file_module(Path(where)) if where.endswith(".py") else _named_module(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise _UsageError(f"{where} has no function {name!r}")
    return found  # type: ignore[no-any-return]  # as just seen


def _file_module(path: Path) -> Any:
    if not path.is_file():
        raise _UsageError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _UsageError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes in it look their module up
    _imported(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]  # as just seen
    return module


def _named_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    return _imported(lambda: importlib.import_module(name), name)


def _imported(load: Callable[[], Any], name: str) -> Any:
    try:
        return load()
    except Exception as error:
        raise _UsageError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def size_bytes(text: str) -> int:
    """A size in bytes: ``80GiB``, ``80GB``, ``1.5 TiB``, ``1048576``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    size = float(found[1]) * (_UNITS | _BINARY_UNITS)[found[2] or ""] if found else math.inf
    if size == math.inf:  # also of hundreds of digits
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a size such as 80GiB")
    return int(size)


def _mesh(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    mesh = {name.strip(): int(size) for name, _, size in pairs if name.strip() and size.strip().isdecimal()}
    if len(mesh) != len(pairs) or 0 in mesh.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not like dp=8,tp=4")
    return mesh


def _product(mesh: dict[str, int]) -> int:
    product = 1
    for size in mesh.values():
        product *= size
    return product


def _ranks(text: str) -> list[str]:
    ranks = [part.strip() for part in text.split(",")]
    if not all(rank == "last" or rank.isdecimal() for rank in ranks):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0,last")
    return ranks


def _assignment(text: str) -> tuple[str, Plain]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, _plain(value)


def _sweep(text: str) -> tuple[str, list[Plain]]:
    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise argparse.ArgumentTypeError(f"{text!r} is not like batch=1,2,4")
    return name, [_plain(value) for value in values.split(",")]


def _plain(text: str) -> Plain:
    named: dict[str, Plain] = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
