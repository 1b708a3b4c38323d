"""``torchmem-exporter``: flags, a validated config, a server until SIGTERM or SIGINT.

Exit status: 0 after a signal, 2 when a setting cannot be used, 1 when the server died; a second signal kills.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir
from torchmem_exporter import __version__
from torchmem_exporter.budget import DEFAULT_DEPTH, DEFAULT_TOP_MODULES, Budget, Level
from torchmem_exporter.config import (
    DEFAULT_KEEP_DAYS,
    DEFAULT_LISTEN,
    DEFAULT_LOG_FORMAT,
    DEFAULT_LOG_LEVEL,
    DEFAULT_STALE_AFTER_SECONDS,
    ValidatedConfig,
    split_address,
)
from torchmem_exporter.drift.held import held_run
from torchmem_exporter.logs import FORMATS, LEVELS, configure, log
from torchmem_exporter.notify import ALIVE, READY, STOPPING, Notifier
from torchmem_exporter.otlp.config import Protocol, from_environ

if TYPE_CHECKING:
    from torchmem_exporter.exposition import Exposition
    from torchmem_exporter.serving.server import Server
    from torchmem_exporter.watcher import Watcher

_END_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_THREADS_SECONDS = 0.2
_LAST_PUSH_SECONDS = 5.0
_LAST_LOOK_SECONDS = 0.5
_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""

_EPILOG = """\
GET /metrics   Prometheus text or OpenMetrics, as the scraper asks; gzip where accepted
GET /healthz   200 while the process lives
GET /readyz    200 while the directory can be read, else 503 and why
GET /          a page for a browser: the ranks, what fills their devices, what has grown

Where users or tokens are asked for, all but /healthz need them, since a kubelet's probe has none. Client certificates
are asked for before any request: there probe the port (tcpSocket), or use VerifyClientCertIfGiven with users or tokens.

OpenTelemetry: with OTEL_EXPORTER_OTLP_ENDPOINT the same is pushed by OTLP; the standard OTEL_* variables say how.

SIGTERM and SIGINT let running requests end, for less than a second, and make a last push; a second signal
does not wait.
"""

logger = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sidecar; returns the process's exit status."""
    try:
        run(parse(arguments))
    except ConfigError as error:
        print(f"torchmem-exporter: {error}", file=sys.stderr)
        return 2
    except Exception:
        logger.exception("the sidecar died")
        return 1
    deadline = time.monotonic() + _THREADS_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                os._exit(0)  # a thread that waits for a disk which does not answer: nothing is lost with it
    return 0


def parse(arguments: Sequence[str] | None = None) -> ValidatedConfig:
    """The settings that the command line gives.

    Raises:
        ConfigError: one of them cannot be used.
    """
    flags = _parser().parse_args(arguments)
    host, port = split_address(flags.listen)
    return ValidatedConfig(
        directory=flags.dir.absolute(),
        host=host,
        port=port,
        stale_after=flags.stale_after,
        keep_days=flags.keep_days,
        state_file=flags.state_file.absolute() if flags.state_file else None,
        push=from_environ(os.environ),
        budget=Budget(Level(flags.level), flags.depth, flags.top_modules),
        held=tuple(held_run(argument) for argument in flags.baseline),
        allow_open_bind=flags.allow_open_bind,
        web_config=flags.web_config,
        bearer_token_file=flags.bearer_token_file,
        log_format=flags.log_format,
        log_level=flags.log_level,
    )


def run(config: ValidatedConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: the address cannot be listened on, a file cannot be used, or a library is missing.
        OSError: the server died.
    """
    _share_memory_between_threads()
    with _signals_held():
        # Only now: a Ctrl-C during the imports is held too, and so ends the process without a traceback.
        try:
            from torchmem_exporter import own
            from torchmem_exporter.exposition import Exposition
            from torchmem_exporter.reading.reader import Reader
            from torchmem_exporter.serving.routes import Routes
            from torchmem_exporter.serving.security import Guard, Sources
            from torchmem_exporter.serving.server import Server
        except ModuleNotFoundError as error:
            raise _missing(error) from None

        guard = Guard(Sources(config.web_config, config.bearer_token_file, config.exposed_host))
        reader = Reader(
            config.directory,
            stale_after=config.stale_after,
            state_path=config.state_file,
            keep_seconds=config.keep_seconds,
        )
        exposition = Exposition(reader, config.budget, held=config.held)
        server = Server(Routes(exposition), guard, config.host, config.port)
        exposition.parts.append(lambda: own.of_server(server.counts, guard))
        configure(config.log_format, config.log_level)
        with _watching(exposition) as watcher, _pushing(config, exposition):
            asyncio.run(_live(server, config, watcher.start))


def _share_memory_between_threads() -> None:
    """Makes all threads allocate from one arena: each of them may make an exposition, one at a time.

    By default each thread keeps what its largest exposition took, which on a large node is tens of megabytes.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


@contextlib.contextmanager
def _watching(exposition: Exposition) -> Iterator[Watcher]:
    """What judges the ranks meanwhile, also when nobody scrapes, once it is started."""
    from torchmem_exporter.watcher import Watcher

    watcher = Watcher(exposition)
    try:
        yield watcher
    finally:
        watcher.close(_LAST_LOOK_SECONDS)


@contextlib.contextmanager
def _pushing(config: ValidatedConfig, exposition: Exposition) -> Iterator[None]:
    """Pushes by OTLP meanwhile, where that is asked for; the end of the sidecar waits for one last push."""
    if config.push is None:
        yield
        return
    try:
        from torchmem_exporter import own
        from torchmem_exporter.otlp.push import Pusher

        if config.push.protocol is Protocol.GRPC:
            import grpc  # noqa: F401  # said to be missing now, not at the first push
    except ModuleNotFoundError as error:
        raise _missing(error) from None

    pusher = Pusher(config.push, lambda: exposition.blocks("otlp"))
    exposition.parts.append(lambda: own.of_pusher(pusher))
    pusher.start()
    try:
        yield
    finally:
        pusher.close(_LAST_PUSH_SECONDS)


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"{error.name} is not installed: pip install 'torchmem[exporter]'")


async def _live(server: Server, config: ValidatedConfig, watch: Callable[[], None]) -> None:
    """The life of the process, from its socket to the end of its last request.

    Args:
        server: what is served.
        config: the settings.
        watch: called once it has been said where that is, so that this is the first line of the log.
    """
    notifier, stop = Notifier(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(number: signal.Signals) -> None:
        for ending in _END_SIGNALS:
            loop.remove_signal_handler(ending)
            signal.signal(ending, signal.SIG_DFL)  # a second one ends the process at once
        log(logger, logging.INFO, "ending", signal=number.name)
        notifier.tell(STOPPING)
        stop.set()

    for ending in _END_SIGNALS:
        loop.add_signal_handler(ending, end, ending)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)
    serving = asyncio.ensure_future(server.serve(stop))
    watchdog = asyncio.ensure_future(_keep_alive(notifier))
    message = f"serving {server.url}metrics from {config.directory}"
    # What follows a question mark may be a secret.
    pushing = {"pushing_to": config.push.endpoint.partition("?")[0]} if config.push else {}
    log(logger, logging.INFO, message, version=__version__, **pushing)
    watch()
    notifier.tell(READY)
    try:
        await serving
    finally:
        watchdog.cancel()


async def _keep_alive(notifier: Notifier) -> None:
    """Tells the service manager, where it wants to know, that the event loop turns."""
    while notifier.watchdog_seconds is not None:
        notifier.tell(ALIVE)
        await asyncio.sleep(notifier.watchdog_seconds / 3)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds the signals that end the process back, in this thread and those it starts, for it to wait for."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchmem-exporter",
        description="Publishes the memory of the training ranks on this host, from the records they leave.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    directory = os.environ.get("TORCHMEM_DIR") or default_dir()
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(directory),
        metavar="DIR",
        help="where the jobs leave their records (default: $TORCHMEM_DIR, else the library's own; now %(default)s)",
    )
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="ADDRESS:PORT", help="where to serve (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-open-bind",
        action="store_true",
        help="serve other machines too, without TLS or without authentication",
    )
    parser.add_argument(
        "--web-config",
        type=Path,
        metavar="FILE",
        help="TLS, client certificates and users, as Prometheus' exporter-toolkit has them; followed as it changes",
    )
    parser.add_argument(
        "--bearer-token-file",
        type=Path,
        metavar="FILE",
        help="lets in who sends one of its lines as bearer token; followed as it changes",
    )
    parser.add_argument(
        "--stale-after",
        type=float,
        default=DEFAULT_STALE_AFTER_SECONDS,
        metavar="SECONDS",
        help="age at which the record of a live rank counts as old (default: %(default)g)",
    )
    parser.add_argument(
        "--keep-days",
        type=float,
        default=DEFAULT_KEEP_DAYS,
        metavar="DAYS",
        help="how long after its last write the folder of a job that has ended stays, with what is kept post mortem;"
        " 0 for always (default: %(default)g)",
    )
    parser.add_argument(
        "--level",
        choices=[level.value for level in Level],
        default=Level.STANDARD.value,
        help="how much is told of a rank: totals by reftype, at most 75 series; the largest modules too, at most 250;"
        " every module (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        default=DEFAULT_DEPTH,
        metavar="N",
        help="at standard: how deep modules are told apart, indices not counted (default: %(default)s)",
    )
    parser.add_argument(
        "--top-modules",
        type=int,
        default=DEFAULT_TOP_MODULES,
        metavar="N",
        help="at standard: modules shown by name, the rest as __other__ (default: %(default)s)",
    )
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="[JOB=]FILE",
        help="hold running jobs against this baseline, which `torchmem baseline save` wrote, instead of learning one:"
        " the job it was saved from, or those whose names fit JOB, a pattern such as 'llama-*'; may be given again",
    )
    parser.add_argument(
        "--state-file",
        type=Path,
        metavar="FILE",
        help="where counts that outlive a rank and a sidecar are kept (default: .exporter-state in the directory)",
    )
    parser.add_argument(
        "--log-format", choices=FORMATS, default=DEFAULT_LOG_FORMAT, help="one line an event (default: %(default)s)"
    )
    parser.add_argument(
        "--log-level",
        choices=tuple(LEVELS),
        default=DEFAULT_LOG_LEVEL,
        help="least that is logged (default: %(default)s)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser
