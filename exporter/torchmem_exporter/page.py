"""The landing page: what is served here and how each rank is.

Invariants: self-contained; escapes whatever it shows; stays under 20 kB however many ranks there are, showing those
that need attention first.
"""

from __future__ import annotations

from html import escape

from torchmem_exporter import __version__
from torchmem_exporter.reader import Snapshot
from torchmem_exporter.samples import clean_label
from torchmem_exporter.states import RankView, State

MAX_ROWS_BYTES = 14_000
MAX_TEXT_CHARACTERS = 80
NUM_REJECTIONS_SHOWN = 5

_ATTENTION = (State.CRASHED, State.STALE, State.RUNNING, State.EXITED)
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --rest: #6e7781 }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #f85149; --warn: #d29922; --rest: #8b949e } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere }
.number { text-align: right }
.running { color: var(--good) } .crashed { color: var(--bad) } .stale { color: var(--warn) }
.exited { color: var(--rest) }
"""
_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>torchmem exporter</title>'
    '<meta name="viewport" content="width=device-width"><style>' + _STYLE + "</style></head>"
)
_LINKS = (
    '<ul><li><a href="/metrics">/metrics</a>: for Prometheus, as text or OpenMetrics</li>'
    '<li><a href="/healthz">/healthz</a>: the sidecar runs</li>'
    '<li><a href="/readyz">/readyz</a>: it can read the records</li></ul>'
)
_COLUMNS = (
    '<thead><tr><th>job</th><th class="number">rank</th><th>state</th><th class="number">step</th>'
    '<th class="number">peak</th><th>host</th></tr></thead>'
)


def landing_page(snapshot: Snapshot, directory: str) -> str:
    """The page as HTML.

    Args:
        snapshot: what the reader found.
        directory: where it looked.
    """
    return (
        f"{_HEAD}<body><h1>torchmem exporter</h1>"
        f"<p>Version {escape(__version__)}, reading <code>{_text(directory)}</code></p>{_LINKS}"
        f"<h2>Ranks</h2>{_table(snapshot)}{_rejections(snapshot)}</body></html>\n"
    )


def _table(snapshot: Snapshot) -> str:
    if not snapshot.is_readable:
        return "<p>The directory cannot be read, or no job has made it yet.</p>"
    if not snapshot.ranks:
        return "<p>No rank has left a record yet.</p>"
    rows: list[str] = []
    num_bytes = 0
    for view in sorted(snapshot.ranks, key=lambda view: _ATTENTION.index(view.state)):
        row = _row(view)
        num_bytes += len(row.encode())
        if num_bytes > MAX_ROWS_BYTES:
            break
        rows.append(row)
    num_hidden = len(snapshot.ranks) - len(rows)
    more = f"<p>and {num_hidden} more</p>" if num_hidden else ""
    return f"<table>{_COLUMNS}<tbody>{''.join(rows)}</tbody></table>{more}"


def _row(view: RankView) -> str:
    identity, state = view.record.identity, view.state.value
    peaks = [device.peak_bytes for device in view.record.devices] if view.has_memory else []
    peak = f"{max(peaks) / 2**30:.3f} GiB" if peaks else ""
    return (
        f'<tr><td>{_text(identity.train_job)}</td><td class="number">{identity.rank}</td>'
        f'<td class="{state}">{state}</td><td class="number">{view.record.clock.step}</td>'
        f'<td class="number">{peak}</td><td>{_text(identity.host)}</td></tr>'
    )


def _rejections(snapshot: Snapshot) -> str:
    if not snapshot.rejections:
        return ""
    items = "".join(
        f"<li><code>{_text(rejection.path)}</code> {escape(rejection.reason)}: {_text(rejection.message)}</li>"
        for rejection in snapshot.rejections[:NUM_REJECTIONS_SHOWN]
    )
    return f"<h2>Refused ({len(snapshot.rejections)})</h2><ul>{items}</ul>"


def _text(value: str) -> str:
    shown = clean_label(value)
    return escape(shown if len(shown) <= MAX_TEXT_CHARACTERS else shown[: MAX_TEXT_CHARACTERS - 1] + "…")
