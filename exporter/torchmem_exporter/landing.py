"""The page at ``/``: what is served, and which ranks are seen in what state.

Invariants: self-contained; every text that comes from a record is escaped; at most ``MAX_PAGE_BYTES``, whatever the
number of ranks and the length of their names; what needs attention comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from torchmem_exporter import __version__
from torchmem_exporter.labels import clean_label
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Snapshot

MAX_PAGE_BYTES = 20_000
_MAX_RANKS_BYTES = 11_000
_MAX_REJECTIONS_BYTES = 4_000
_KIBI = 1024
_URGENCY = (State.CRASHED, State.STALE, State.RUNNING, State.EXITED)

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>torchmem-exporter</title><style>
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
nav a{margin-right:1rem}table{border-collapse:collapse;width:100%}caption{text-align:left;padding:.5rem 0}
th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8884;overflow-wrap:anywhere}
.n{text-align:right;font-variant-numeric:tabular-nums}.running{color:light-dark(#17692c,#6ad283)}
.stale{color:light-dark(#8a5a00,#e5b454)}.crashed,.problem{color:light-dark(#b3261e,#ff8a80);font-weight:600}
</style></head><body>
"""


def page(snapshot: Snapshot, directory: Path) -> bytes:
    """The page for what a scan of the directory found."""
    parts = [
        _HEAD,
        f"<h1>torchmem-exporter</h1><p>Version {escape(__version__)}, serving the records in <code>",
        f"{_text(str(directory))}</code>.</p>",
        '<nav><a href="/metrics">Metrics</a><a href="/healthz">Health</a><a href="/readyz">Readiness</a></nav>',
    ]
    if snapshot.problem:
        parts.append(f'<p class="problem">{escape(clean_label(snapshot.problem))}</p>')
    parts.append(_ranks(snapshot))
    parts.append(_rejections(snapshot))
    parts.append("</body></html>\n")
    return "".join(parts).encode()


def _ranks(snapshot: Snapshot) -> str:
    if not snapshot.ranks:
        return "<p>No rank has left a record.</p>"
    columns = "<th>Job<th class=n>Rank<th>Host<th>State<th class=n>Step<th class=n>Peak<th class=n>Record age"
    ranks = sorted(snapshot.ranks, key=lambda rank: _URGENCY.index(rank.state))
    rows = _bounded((_rank_row(rank, snapshot.taken_at) for rank in ranks), _MAX_RANKS_BYTES, num_columns=7)
    head = f"<caption>Ranks: {len(snapshot.ranks)}</caption><thead><tr>{columns}</thead>"
    return f"<table>{head}<tbody>{rows}</tbody></table>"


def _rank_row(rank: Rank, now: float) -> str:
    identity, clock = rank.record.identity, rank.record.clock
    devices = rank.record.devices if rank.has_memory else []
    peaks = ", ".join(f"{device.name}: {readable_bytes(device.peak_bytes)}" for device in devices)
    state = rank.state.value
    return (
        f"<tr><td>{_text(identity.train_job)}<td class=n>{identity.rank}<td>{_text(identity.host)}"
        f"<td class={state}>{state}<td class=n>{clock.step}<td class=n>{_text(peaks)}"
        f"<td class=n>{max(0.0, now - clock.written_at):.0f}&nbsp;s"
    )


def _rejections(snapshot: Snapshot) -> str:
    if not snapshot.rejections:
        return ""
    head = "<thead><tr><th>File<th>Reason<th>Detail</thead>"
    cells = (f"<tr><td>{_text(r.path)}<td>{_text(r.reason)}<td>{_text(r.detail)}" for r in snapshot.rejections)
    rows = _bounded(cells, _MAX_REJECTIONS_BYTES, num_columns=3)
    caption = f"<caption class=problem>Not usable: {len(snapshot.rejections)}</caption>"
    return f"<table>{caption}{head}<tbody>{rows}</tbody></table>"


def _bounded(rows: Iterable[str], max_bytes: int, *, num_columns: int) -> str:
    """As many rows as fit, and how many were left out."""
    kept: list[str] = []
    num_bytes = num_left_out = 0
    for row in rows:
        num_bytes += len(row.encode())
        if num_bytes <= max_bytes:
            kept.append(row)
        else:
            num_left_out += 1
    if num_left_out:
        kept.append(f"<tr><td colspan={num_columns}>and {num_left_out} more")
    return "".join(kept)


def readable_bytes(num_bytes: int) -> str:
    """A byte count in the largest binary unit that leaves something before the point."""
    amount, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(amount) >= _KIBI and len(units) > 1:
        amount /= _KIBI
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def _text(text: str) -> str:
    return escape(clean_label(text))
