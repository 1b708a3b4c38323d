"""The live view: panes, keys and a timer, with Textual.

Invariants: reading happens beside the event loop, one reading at a time, so that keys answer while a slow directory is
read, and its end waits for none; Ctrl-C, ``q``, SIGTERM and a terminal that hangs up end it with the terminal as it
was; the terminal's own colours are used, none where ``NO_COLOR`` is set.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Footer, Static

from torchmem.watching import drawing
from torchmem.watching.choice import WIDE, Choice, heights
from torchmem.watching.drawing import NUM_GROWERS
from torchmem.watching.lines import Page
from torchmem.watching.look import Look, Watcher
from torchmem.watching.rank_table import ranks

SIGNALLED = 128
"""Added to a signal's number in the exit status of what it ended."""

HELP = """\
up, k     the rank above
down, j   the rank below
tab, d    the next device
u         unfold layers.* into layers.0, layers.1, ...
p         at the peak of a step, or at its end
s         sort the ranks by number, by peak, by drift
q         quit

crashed   ended, but not cleanly
stale     alive, but writes no more
oom       an allocation failed
full      95% of a device are in use at the step peak
drift     step peaks are over their baseline, by more than 5%
leak      what is left at the ends of steps grows steadily
forecast  step peaks are over what was forecast, by more than 10%
labeler   a part of the counting is disabled
learning  too few steps were seen to know what is usual

any key closes this"""


def _read_into(answer: Future[Look], watcher: Watcher) -> None:
    try:
        answer.set_result(watcher.look())
    except Exception as error:  # noqa: BLE001  # whoever waits for it raises it
        answer.set_exception(error)


class Pane(Widget):
    """A part of the screen that is drawn anew from the latest reading.

    Args:
        draw: what is drawn in so many columns and lines.
        name: its id.
    """

    def __init__(self, draw: Callable[[int, int], RenderableType], name: str) -> None:
        super().__init__(id=name)
        self._draw = draw

    def render(self) -> RenderableType:
        """What it shows now."""
        return self._draw(self.size.width, self.size.height)


class Help(ModalScreen[None]):
    """The keys and the words."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help Static { width: auto; height: auto; max-width: 100%; max-height: 100%; border: solid; padding: 0 1; }
    """

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(Text(HELP))

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class WatchApp(App[int]):
    """The whole view.

    Args:
        watcher: what reads.
        interval: seconds between readings.
        top: rows of holders at most; as many as there is room for where None.
        encoding: of the terminal.
    """

    CSS = """
    Screen { layout: vertical; }
    #header, #waiting { height: auto; }
    #parts { layout: vertical; height: auto; }
    #parts.wide { layout: horizontal; }
    #parts.wide #holders { width: 3fr; }
    #parts.wide #growers { width: 2fr; margin-left: 2; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "rank", key_display="up/down", priority=True),
        Binding("down,j", "move(1)", "rank below", show=False, priority=True),
        Binding("d", "next_device", "device", key_display="d"),
        Binding("tab", "next_device", show=False, priority=True),
        Binding("u", "unfold", "unfold"),
        Binding("s", "sort", "sort"),
        Binding("p", "book", "peak/usage"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit_with(0)", "quit"),
        Binding("ctrl+c", f"quit_with({SIGNALLED + signal.SIGINT})", show=False, priority=True),
        Binding("ctrl+q", "quit_with(0)", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, watcher: Watcher, interval: float, top: int | None, encoding: str) -> None:
        super().__init__(ansi_color=True)
        self.look: Look | None = None
        self.choice = Choice()
        self._watcher = watcher
        self._interval = interval
        self._top = top
        self._encoding = encoding

    def compose(self) -> ComposeResult:
        """All panes, the empty ones too."""
        yield Pane(lambda width, _: self._drawn(lambda page: drawing.header(page, width)), "header")
        yield Pane(lambda _width, _height: self._drawn(drawing.waiting), "waiting")
        yield Pane(lambda width, height: self._drawn(lambda page: ranks(page, width, height)), "ranks")
        yield Pane(lambda width, height: self._drawn(lambda page: drawing.alerts_pane(page, width, height)), "alerts")
        with Container(id="parts"):
            yield Pane(
                lambda width, height: self._drawn(lambda page: drawing.holders(page, width, height, self._top)),
                "holders",
            )
            yield Pane(lambda width, height: self._drawn(lambda page: drawing.growers(page, width, height)), "growers")
        yield Pane(lambda width, height: self._drawn(lambda page: drawing.timeline(page, width, height)), "timeline")
        yield Footer()

    def _drawn(self, draw: Callable[[Page], RenderableType]) -> RenderableType:
        return Text() if self.look is None else draw(Page(self.look, self.choice, self._encoding))

    def on_mount(self) -> None:
        """Begins to read, and to listen to signals."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.action_quit_with, SIGNALLED + number)
        self.set_interval(self._interval, self._read)
        self._arrange()
        self._read()

    def on_resize(self) -> None:
        """The panes share the terminal anew."""
        self._arrange()

    # -- reading

    def _read(self) -> None:
        if not any(worker.group == "reading" and not worker.is_finished for worker in self.workers):
            self._read_beside()

    @work(group="reading")
    async def _read_beside(self) -> None:
        answer: Future[Look] = Future()
        answer.set_running_or_notify_cancel()
        # No worker of Textual's: whoever ends the view would wait for a disk that does not answer.
        threading.Thread(target=_read_into, args=(answer, self._watcher), daemon=True).start()
        self._take(await asyncio.wrap_future(answer))

    def _take(self, look: Look) -> None:
        self.look = look
        self._arrange()

    def _arrange(self) -> None:
        """Shares the terminal among the panes and draws them."""
        look, (width, height) = self.look, self.size
        if not self.screen_stack:  # a look that comes in at the very end
            return
        panes = {pane.id: pane for pane in self.screen_stack[0].query(Pane)}
        is_empty = look is None or not look.ranks
        for name, pane in panes.items():
            pane.display = name == "header" or (name == "waiting") == is_empty
        if look is not None and not is_empty:
            chosen = self.choice.chosen(look)
            one = chosen.device(self.choice.device) if chosen else None
            shared = heights(
                width,
                height - 2,
                num_ranks=len(look.ranks),
                num_alerts=len(drawing.alert_lines(look, chosen)),
                num_growers=min(NUM_GROWERS, len(one.verdict.growers or ())) if one else 0,
            )
            for name, lines in shared._asdict().items():
                if name in panes:  # while the view ends they go one by one
                    panes[name].styles.height = lines
            self.screen_stack[0].query("#parts").set_class(width >= WIDE, "wide")
        for pane in panes.values():
            pane.refresh(layout=True)

    # -- keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002  # Textual's
        """Whether a key may do this now: while the help is open, it closes the help."""
        return not isinstance(self.screen, Help) or action in ("quit_with", "suspend_process")

    def action_move(self, num_rows: int) -> None:
        """Chooses another rank."""
        if self.look is not None:
            self._choose(self.choice.moved(self.look, num_rows))

    def action_next_device(self) -> None:
        """Shows the next device of each rank."""
        if self.look is not None:
            self._choose(self.choice.with_next_device(self.look))

    def action_unfold(self) -> None:
        """Tells layers apart, or no more."""
        self._choose(self.choice.unfolded())

    def action_sort(self) -> None:
        """Sorts the ranks by something else."""
        self._choose(self.choice.sorted_anew())

    def action_book(self) -> None:
        """Shows the other book."""
        self._choose(self.choice.with_other_book())

    def action_help(self) -> None:
        """Says what keys and words mean."""
        self.push_screen(Help())

    def action_quit_with(self, status: int) -> None:
        """Ends with this exit status."""
        self.exit(status)

    def _choose(self, choice: Choice) -> None:
        self.choice = choice
        self._arrange()
