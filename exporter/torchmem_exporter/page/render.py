"""The view as bytes of HTML, and the policy that a browser is to keep to.

Invariants: one template, escaped throughout; style and script are the page's own, known to the browser by their hashes,
so that none from anywhere else can run; nobody waits for anything but this.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from torchmem.model import Phase
from torchmem_exporter import __version__, words
from torchmem_exporter.page import drawing, palette
from torchmem_exporter.page.choice import Choice, ChoiceError, parsed
from torchmem_exporter.page.view import Looked, NotHereError, View, refused, view

MAX_PAGE_BYTES = 100_000
REFRESH_SECONDS = 1
PLAIN_REFRESH_SECONDS = 10
"""Likewise where there are no scripts: the whole page is loaded anew then."""
HISTORY_STEPS = 12
"""Steps in the table beside the timeline."""
_ROOMS = (1.0, 0.5, 0.2)
"""Tried in turn: names full of what must be escaped take several times the usual."""
_FOLDER = Path(__file__).parent


class Assets(NamedTuple):
    """What never changes of the page."""

    template: Template
    style: Markup
    script: Markup
    policy: str


class Rendered(NamedTuple):
    """A page and its status."""

    status: HTTPStatus
    body: bytes


def rendered(looked: Looked, query: str) -> Rendered:
    """The page that a query asks for, or the one that says why there is none."""
    for room in _ROOMS:
        found = _rendered(looked, query, room)
        if len(found.body) <= MAX_PAGE_BYTES:
            break
    return found


def _rendered(looked: Looked, query: str, room: float) -> Rendered:
    choice = Choice()
    try:
        choice = parsed(query)
        return Rendered(HTTPStatus.OK, html(view(looked, choice, room)))
    except ChoiceError as error:
        message = f"This address cannot be understood: {error}."
        return Rendered(HTTPStatus.BAD_REQUEST, html(refused(looked, choice, message, room)))
    except NotHereError as error:
        return Rendered(HTTPStatus.NOT_FOUND, html(refused(looked, choice, str(error), room)))


def html(shown: View) -> bytes:
    """The page of a view."""
    page = assets()
    return page.template.render(
        view=shown,
        style=page.style,
        script=page.script,
        version=__version__,
        seconds=REFRESH_SECONDS,
        plain_seconds=PLAIN_REFRESH_SECONDS,
        num_steps=HISTORY_STEPS,
        is_plain=shown.choice == Choice(is_live=shown.choice.is_live),
    ).encode()


@cache
def assets() -> Assets:
    """Template, style and script, read once."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=words.size, percent=words.percent, moment=words.moment, shown=words.shown, style=_style_name, held=_held
    )
    environment.globals.update(treemap=drawing.treemap, chart=drawing.chart, textures=drawing.textures())
    # Of the page's own files, and nobody else's.
    style = Markup(f"{(_FOLDER / 'page.css').read_text()}{palette.css()}{_fits()}")  # noqa: S704
    script = Markup((_FOLDER / "page.js").read_text())  # noqa: S704
    policy = (
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return Assets(environment.get_template("page.html"), style, script, "; ".join(policy))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _fits() -> str:
    """Shows the treemap's labels from the width on at which they fit."""
    rules = (
        f"@container(min-width:{width}px){{.treemap .f{i}{{display:inline}}}}" for i, width in enumerate(drawing.FITS)
    )
    return "".join(rules)


def _held(phases: int) -> str:
    """What sets a step apart."""
    names = {Phase.CHECKPOINT: "checkpoint", Phase.EVAL: "evaluation"}
    return ", ".join(name for phase, name in names.items() if phases & phase)


def _style_name(reftype: str) -> str:
    return palette.style_of(reftype).name
