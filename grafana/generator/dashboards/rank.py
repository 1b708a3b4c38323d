"""The dashboard of one rank: its timeline, and its device module by module.

Invariant: everything but the state is of one device of one rank, so that stacks add up to what that device holds.
"""

from __future__ import annotations

from generator.dashboards.page import RANK, Page, Row, device_choice, rank_choice
from generator.dashboards.panels import (
    BAD,
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    GOOD,
    NEUTRAL,
    NO_CELL,
    PER_SECOND,
    PLAIN,
    RATIO,
    REFTYPES,
    SECONDS,
    WARNING,
    Query,
    Show,
    above,
    bars,
    lines,
    number,
    states,
)
from generator.dashboards.scope import RATE_WINDOW, Scope, overhead
from generator.dashboards.tables import Column, matrix, rows
from generator.settings import Settings
from torchmem_exporter import catalog
from torchmem_exporter.catalog import Metric

ALIVE = {"0": ("gone", BAD), "1": ("alive", GOOD)}
WORKS = {"0": ("off", BAD), "1": ("works", GOOD)}
STATES = {"1": ("running", GOOD), "2": ("stale", WARNING), "3": ("crashed", BAD), "4": ("exited", NEUTRAL)}
NUM_MODULES = 12


def page(settings: Settings) -> Page:
    """The dashboard."""
    scope = Scope(settings)
    return Page(
        uid=RANK,
        about="One rank: what its device holds step by step, by module and by what it is for.",
        scope=scope,
        variables=(rank_choice(scope, many=False), device_choice(scope, many=False)),
        rows=(_now(scope), _timeline(scope), _modules(scope), _allocator(scope), _watching(scope)),
    )


def _total(scope: Scope, metric: Metric) -> str:
    return f"sum(max by (reftype) ({scope.devices(metric)}))"


def _of_device(scope: Scope, metric: Metric) -> str:
    return f"max({scope.devices(metric)})"


def _state(scope: Scope) -> str:
    """The rank's state as its number among ``STATES``; of all states exactly one is 1."""
    terms = (f"{number} * max({scope.ranks(catalog.RANK_STATE, state=word)})" for number, (word, _) in STATES.items())
    return "\n+ ".join(terms)


def _now(scope: Scope) -> Row:
    settings = scope.settings
    info = f"max by (host, pid, engine, gpu_uuid, dp, tp, pp) ({scope.ranks(catalog.RANK_INFO)})"
    headings = {
        "host": "Host",
        "pid": "Process",
        "engine": "Engine",
        "gpu_uuid": "GPU",
        "dp": "dp",
        "tp": "tp",
        "pp": "pp",
    }
    parts = (_total(scope, catalog.STEP_PEAK), _of_device(scope, catalog.UNATTRIBUTED))
    used = f"({' + '.join(parts)} + ({_of_device(scope, catalog.OTHER)} or vector(0)))"
    panels = (
        number(
            Show(
                title="Process",
                about="Whether the rank's process lives.",
                unit=COUNT,
                span=4,
                height=5,
                no_value="unknown",
            ),
            Query(f"max({scope.ranks(catalog.RANK_UP)})", "rank"),
            ALIVE,
        ),
        number(
            Show(title="Step", about="The last finished step.", unit=PLAIN, span=5, height=5),
            Query(f"max({scope.ranks(catalog.STEP_NUMBER)})", "step"),
        ),
        number(
            Show(
                title="Record's age",
                about="Time since the rank wrote its record. It writes each second: a minute and more is a process "
                "that hangs or is stopped.",
                unit=SECONDS,
                span=5,
                height=5,
                limits=above(10, 60),
            ),
            Query(f"time() - max({scope.ranks(catalog.SNAPSHOT_TIMESTAMP)})", "age"),
        ),
        number(
            Show(title="Step peak", about="The most that the device holds in a step.", unit=BYTES, span=5, height=5),
            Query(_total(scope, catalog.STEP_PEAK), "step peak"),
        ),
        number(
            Show(
                title="Device filled",
                about="Step peak, what has no name, and what others use on the device, over its capacity.",
                unit=RATIO,
                span=5,
                height=5,
                limits=above(0.85, settings.max_filled_ratio),
                no_value="capacity unknown",
            ),
            Query(f"{used} / max({scope.devices(catalog.LIMIT)} > 0)", "filled"),
        ),
        rows(
            Show(
                title="Who it is",
                about="Where the rank runs, how memory is counted (native: every allocation), and its place in the "
                "mesh. Two rows: it was restarted, or two sidecars tell of it.",
                unit=PLAIN,
                span=24,
                height=4,
            ),
            headings,
            Column(name="", expr=info, unit=PLAIN),
            sort_by="Host",
        ),
    )
    return "Now", panels


def _timeline(scope: Scope) -> Row:
    panels = (
        lines(
            Show(
                title="Timeline",
                about="Step peak, what is left at the step's end, the highest since the process began, and what is "
                "usual and was forecast. Ends of steps that rise are a leak; peaks that rise alone are larger batches.",
                unit=BYTES,
                span=16,
                height=9,
            ),
            Query(_total(scope, catalog.STEP_PEAK), "step peak"),
            Query(_total(scope, catalog.USAGE), "step end"),
            Query(_of_device(scope, catalog.PEAK), "since start"),
            Query(_of_device(scope, catalog.BASELINE), "baseline"),
            Query(_of_device(scope, catalog.FORECAST), "forecast"),
        ),
        states(
            Show(
                title="State",
                about="Running; stale: the process lives and has stopped writing; crashed: gone without a word; "
                "exited: ended cleanly.",
                unit=PLAIN,
                span=8,
                height=9,
            ),
            Query(_state(scope), "rank"),
            STATES,
        ),
        lines(
            Show(
                title="Step peak by what it is for",
                about="What the device holds at the instant of its step peak; the parts add up to the peak.",
                unit=BYTES,
                height=9,
            ),
            Query(f"max by (reftype) ({scope.devices(catalog.STEP_PEAK)})", "{{reftype}}"),
            stacked=True,
            colors=REFTYPES,
        ),
        lines(
            Show(
                title="Step end by what it is for",
                about="What is still alive when a step has ended. Activations here are kept by mistake, unless the job "
                "holds on to outputs on purpose.",
                unit=BYTES,
                height=9,
            ),
            Query(f"max by (reftype) ({scope.devices(catalog.USAGE)})", "{{reftype}}"),
            stacked=True,
            colors=REFTYPES,
        ),
    )
    return "Timeline", panels


def _modules(scope: Scope) -> Row:
    at_peak = f"max by (module, reftype) ({scope.devices(catalog.MODULE_STEP_PEAK)})"
    active = f"max by (module, reftype) ({scope.devices(catalog.MODULE_ACTIVE_PEAK)})"
    panels = (
        lines(
            Show(
                title="Step peak by module",
                about="Who holds the step peak over time. A band that widens is the module that grows.",
                unit=BYTES,
                height=11,
            ),
            Query(f"sum by (module) ({at_peak})", "{{module}}"),
            stacked=True,
        ),
        bars(
            Show(
                title="Active peaks",
                about="The most that the whole device held while each module ran, the highest first. The module at "
                "which the step peaks is the one to checkpoint or to split; these do not add up.",
                unit=BYTES,
                height=11,
            ),
            Query(f"topk({NUM_MODULES}, sum by (module) ({active}))", "{{module}}"),
        ),
        matrix(
            Show(
                title="Step peak: module and what it is for",
                about="The step peak of now, a module a row. The cells add up to the peak. `__other__` holds the "
                "modules beyond the budget of series.",
                unit=BYTES,
                span=24,
                height=10,
                no_value=NO_CELL,
            ),
            at_peak,
            "module",
            "reftype",
        ),
        matrix(
            Show(
                title="Active peaks: what they are made of",
                about="What the device held at the highest point of each module's own run, by what it is for.",
                unit=BYTES,
                span=24,
                height=10,
                no_value=NO_CELL,
            ),
            active,
            "module",
            "reftype",
        ),
    )
    return "Modules", panels


def _allocator(scope: Scope) -> Row:
    held = {
        "handed out": catalog.ALLOCATED,
        "active": catalog.ACTIVE,
        "reserved": catalog.RESERVED,
        "in pieces": catalog.INACTIVE_SPLIT,
        "capacity": catalog.LIMIT,
    }
    panels = (
        lines(
            Show(
                title="Allocator",
                about="What has a name at a step's end; what torch's allocator has handed out, keeps busy for streams, "
                "has taken from the device and holds in pieces; and the device's capacity. The CPU's allocator keeps "
                "nothing back, so there is less to show.",
                unit=BYTES,
                span=8,
            ),
            Query(_total(scope, catalog.USAGE), "with a name"),
            *(Query(_of_device(scope, metric), name) for name, metric in held.items()),
        ),
        lines(
            Show(
                title="Remainder",
                about="Bytes that the allocator holds and no module could be named for, and bytes used on the device "
                "outside of the allocator: communicators, libraries, other processes.",
                unit=BYTES,
                span=8,
            ),
            Query(_of_device(scope, catalog.UNATTRIBUTED), "without a name"),
            Query(_of_device(scope, catalog.OTHER), "outside the allocator"),
        ),
        lines(
            Show(
                title="Fragmentation",
                about="Share of what the allocator has reserved that is free but in pieces.",
                unit=RATIO,
                span=8,
                limits=above(scope.settings.max_fragmentation_ratio),
                no_value="accelerators only",
            ),
            Query(_of_device(scope, catalog.FRAGMENTATION), "fragmentation"),
        ),
        lines(
            Show(
                title="Allocations retried and failed",
                about="In the time of one point. Retries cost pace and come before failures; after a failure the "
                "rank's own post-mortem (`torchmem post-mortem`) says what filled the device.",
                unit=COUNT,
                span=8,
            ),
            Query(f"sum(increase({scope.devices(catalog.RETRIES, RATE_WINDOW)}))", "retried"),
            Query(f"sum(increase({scope.devices(catalog.OOMS, RATE_WINDOW)}))", "failed"),
        ),
        lines(
            Show(
                title="Checkpoint peaks",
                about="The most that the device held while the latest checkpoint was saved or loaded.",
                unit=BYTES,
                span=8,
                no_value="no checkpoint yet",
            ),
            Query(f"max by (operation) ({scope.devices(catalog.CHECKPOINT_PEAK)})", "{{operation}}"),
        ),
        lines(
            Show(
                title="Growth between steps",
                about="Robust slope of the bytes alive at the ends of steps.",
                unit=BYTES_PER_SECOND,
                span=8,
                no_value="too few steps yet",
            ),
            Query(_of_device(scope, catalog.GROWTH), "growth"),
            minimum=None,
        ),
    )
    return "Allocator", panels


def _watching(scope: Scope) -> Row:
    steps = f"rate({scope.ranks(catalog.STEPS, RATE_WINDOW)})"
    panels = (
        lines(
            Show(
                title="Cost of watching",
                about="Share of the step time that torchmem takes on this rank. Above the line, lower the depth at "
                "which modules are told apart.",
                unit=RATIO,
                span=8,
                limits=above(scope.settings.max_overhead_ratio),
            ),
            Query(overhead(scope, "rank"), "watching"),
        ),
        lines(
            Show(
                title="Time of a step",
                about="Mean time of a step, and of watching it.",
                unit=SECONDS,
                span=8,
            ),
            Query(f"max(rate({scope.ranks(catalog.STEP_TIME, RATE_WINDOW)}) / ({steps} > 0))", "step"),
            Query(f"max(rate({scope.ranks(catalog.TRACKER_TIME, RATE_WINDOW)}) / ({steps} > 0))", "watching"),
        ),
        lines(
            Show(title="Pace", about="Steps a second. Zero while the rank hangs.", unit=PER_SECOND, span=8),
            Query(f"max({steps})", "steps"),
        ),
        states(
            Show(
                title="Parts of torchmem",
                about="Whether each part that names memory works. One that failed is off, and its bytes count as "
                "`other`; the rank's record says why (`torchmem show`).",
                unit=PLAIN,
                span=16,
            ),
            Query(f"min by (labeler) ({scope.ranks(catalog.LABELER_UP)})", "{{labeler}}"),
            WORKS,
        ),
        lines(
            Show(
                title="Modules folded",
                about="Modules that hold memory and are not told apart: the budget of series sums them. Start the "
                "sidecar with a higher level to see more.",
                unit=COUNT,
                span=8,
            ),
            Query(f"max({scope.ranks(catalog.MODULES_FOLDED)})", "folded"),
        ),
    )
    return "Watching", panels
