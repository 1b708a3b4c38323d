"""Records of a large training job for the page to show, and the Chromium that looks at it."""

from __future__ import annotations

import array
import contextlib
import time
from urllib.parse import urlsplit

from playwright.sync_api import Error, sync_playwright

from backends import LOOPBACK
from records import GIB, WRITTEN_AT, make_record, total
from torchmem.model import OUTSIDE, REFTYPE_LABELS, ROOT, Phase, RefType
from torchmem.wire import record as wire

LOAD_SECONDS = 30.0
FLAGS = (
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MIB = 1 << 20
NUM_LAYERS = 32
STEP_SECONDS = 1.5
PARTS = {
    "attention.wq": 3,
    "attention.wk": 1,
    "attention.wv": 1,
    "attention.wo": 3,
    "mlp.w1": 6,
    "mlp.w2": 6,
    "norm": 1,
}
MODULES = [OUTSIDE, ROOT, "embedding", *(f"layers.{i}.{part}" for i in range(NUM_LAYERS) for part in PARTS), "head"]
WEIGHTS = [1, 4, 40, *(weight * 2 for _ in range(NUM_LAYERS) for weight in PARTS.values()), 40]
HELD_GIB = {
    RefType.SHARDED_PARAMETER: 6.0,
    RefType.OPTIMIZER_STATE: 18.0,
    RefType.SHARDED_GRADIENT: 6.0,
    RefType.ACTIVATION: 16.0,
    RefType.RECOMPUTATION: 3.0,
    RefType.UNSHARDED_PARAMETER: 2.5,
    RefType.ALL_GATHER: 2.0,
    RefType.REDUCE_SCATTER: 1.0,
    RefType.TEMPORARY: 1.5,
    RefType.INPUT: 0.2,
    RefType.BUFFER: 0.1,
    RefType.OTHER: 0.3,
}
KEPT = (RefType.SHARDED_PARAMETER, RefType.OPTIMIZER_STATE, RefType.BUFFER)
EVAL_EVERY, CHECKPOINT_EVERY = 90, 150
LEAKING = MODULES.index("layers.17.attention.wo")


def held(reftypes, leaked_bytes=0):
    """Cells of a book: every module's share of each reftype."""
    share = {reftype: int(HELD_GIB[reftype] * GIB) // sum(WEIGHTS) for reftype in reftypes}
    found = {(m, int(r)): weight * share[r] for m, weight in enumerate(WEIGHTS) for r in reftypes}
    leak = (LEAKING, int(RefType.ACTIVATION))
    if leaked_bytes:
        found[leak] = found.get(leak, 0) + leaked_bytes
    return [wire.Cell(m, r, num_bytes) for (m, r), num_bytes in found.items()]


def phases_of(step):
    """What a step holds."""
    phases = Phase.FORWARD | Phase.BACKWARD | Phase.OPTIMIZER
    if step % CHECKPOINT_EVERY == 0:
        phases |= Phase.CHECKPOINT
    return phases | Phase.EVAL if step % EVAL_EVERY == 0 else phases


def trained(rank=0, step=400, *, leak_from=None, leak_mib=40, **overrides):
    """The record of a rank after so many steps, of which those from ``leak_from`` on leak so much each.

    Others override fields as of ``records.make_record``.
    """

    def leaked(at):
        return 0 if leak_from is None else max(0, at - leak_from) * leak_mib * MIB

    ended_at = overrides.get("written_at", WRITTEN_AT)
    peak, usage = held(tuple(HELD_GIB), leaked(step)), held(KEPT, leaked(step))
    numbers = range(max(1, step - 511), step + 1)
    name = f"cuda:{rank % 8}"
    rows = {"step_peak": array.array("q"), "step_end": array.array("q")}
    for at in numbers:
        wobble = 1 + 0.004 * ((at * 7919 + rank * 31) % 11 - 5) / 5
        for column, reftypes in (("step_peak", tuple(HELD_GIB)), ("step_end", KEPT)):
            row = [0] * len(REFTYPE_LABELS)
            for reftype in reftypes:
                row[reftype] = int(HELD_GIB[reftype] * GIB)
            row[RefType.ACTIVATION] = int(row[RefType.ACTIVATION] * wobble) + leaked(at)
            if column == "step_peak" and phases_of(at) & Phase.CHECKPOINT:
                row[RefType.CHECKPOINT] = 9 * GIB
            rows[column].extend(row)
    device = {
        "name": name,
        "usage": wire.pack_cells(usage),
        "step_peak": wire.pack_cells(peak),
        "usage_bytes": total(usage),
        "step_peak_bytes": total(peak),
        "peak_bytes": total(peak) + 9 * GIB,
        "unattributed_bytes": 700 * MIB,
        "limit_bytes": 80 * GIB,
        "active_peak": b"",
        "checkpoint_peaks": {"save": total(peak) + 9 * GIB},
        "allocator": wire.Allocator(reserved_bytes=total(peak) + 2 * GIB, inactive_split_bytes=GIB),
    }
    ring = wire.Ring(
        steps=array.array("q", numbers).tobytes(),
        ended_at=array.array("d", [ended_at - (step - at) * STEP_SECONDS for at in numbers]).tobytes(),
        phases=array.array("q", [int(phases_of(at)) for at in numbers]).tobytes(),
        devices=[wire.RingDevice(name=name, **{column: row.tobytes() for column, row in rows.items()})],
    )
    labelers = [wire.Labeler(name=name, up=True) for name in ("modules", "fsdp2", "optimizer", "recompute")]
    fields = {
        "modules": MODULES,
        "ring": ring,
        "world_size": 64,
        "step": step,
        "step_seconds": step * STEP_SECONDS,
        "tracker_seconds": step * 0.005,
        "labelers": labelers,
        **device,
    }
    return make_record(rank, **{**fields, **overrides})


@contextlib.contextmanager
def launched(program):
    """A Chromium, by its path."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def browsing(browser, *, bears=None, **options):
    """A page of its own in a Chromium; fails at the end if it said an error or asked any other host.

    Args:
        browser: as launched.
        bears: words of an error that is meant to come; a page that follows says it again and again, to its very end.
        options: of the browser's context, as ``color_scheme``.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(LOAD_SECONDS * 1000)
    page.said, hosts = [], set()
    page.on("console", lambda message: page.said.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    try:
        yield page
    finally:
        context.close()
    assert [text for text in page.said if bears is None or bears not in text] == []
    assert hosts - {LOOPBACK, None} == set()


def wait_for(page, expression, expected=True):  # noqa: FBT002  # of what an expression gives
    """Waits until an expression has a value; the page's policy forbids the driver's own way, which evaluates there.

    Raises:
        TimeoutError: it never had.
    """
    found, deadline = None, time.monotonic() + LOAD_SECONDS
    while True:
        with contextlib.suppress(Error):  # of a page that is just being left
            if (found := page.evaluate(expression)) == expected:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{expression} is {found!r}, not {expected!r}")
        page.wait_for_timeout(10)
