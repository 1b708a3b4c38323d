"""``torchmem-exporter``: flags, a validated config, a server until SIGTERM or SIGINT.

Exit status: 0 after a signal, 2 when a setting cannot be used, 1 when the server died.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from torchmem.errors import ConfigError
from torchmem.wire.store import default_dir
from torchmem_exporter import __version__
from torchmem_exporter.config import DEFAULT_LISTEN, DEFAULT_STALE_AFTER_SECONDS, ValidatedConfig, split_address

_END_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_CHECK_SECONDS = 1.0

_EPILOG = """\
GET /metrics   Prometheus text or OpenMetrics, as the scraper asks; gzip where accepted
GET /healthz   200 while the process lives
GET /readyz    200 while the directory can be read, else 503 and why
GET /          a page that lists the ranks and what could not be read
"""


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
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(0)  # a worker that waits for a client which does not read: nothing is lost with it
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
        allow_open_bind=flags.allow_open_bind,
    )


def run(config: ValidatedConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        ConfigError: the address cannot be listened on, or a library is missing.
        RuntimeError: the server died.
    """
    with _signals_held():
        # Only now: a Ctrl-C during the imports is held too, and so ends the process without a traceback.
        try:
            from torchmem_exporter.reader import Reader
            from torchmem_exporter.server import application, serving
        except ModuleNotFoundError as error:
            raise ConfigError(f"{error.name} is not installed: pip install 'torchmem[exporter]'") from None

        reader = Reader(config.directory, stale_after=config.stale_after)
        with serving(application(reader), config.host, config.port) as server:
            message = f"serving {server.url}metrics from {config.directory}"
            print(f"torchmem-exporter {__version__}: {message}", file=sys.stderr, flush=True)
            while signal.sigtimedwait(_END_SIGNALS, _CHECK_SECONDS) is None:
                if not server.thread.is_alive():
                    raise RuntimeError("the server's thread died")


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
        help="serve other machines too, although there is neither TLS nor authentication",
    )
    parser.add_argument(
        "--stale-after",
        type=float,
        default=DEFAULT_STALE_AFTER_SECONDS,
        metavar="SECONDS",
        help="age at which the record of a live rank counts as old (default: %(default)g)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser
