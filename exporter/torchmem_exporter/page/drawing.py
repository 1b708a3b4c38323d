"""The treemap and the timeline as SVG that fits any width without scripts.

Positions across are percentages, heights pixels, so that text keeps its size; a label is shown from the width on at
which there is room for all of it, by a container query of the style sheet (``.f0`` and on).

Invariants: pure; all text is escaped; nothing is told by colour alone: each figure has its names as text, a legend with
textures, and a table beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup

from torchmem.model import Phase
from torchmem_exporter.page.detail import Group, Held
from torchmem_exporter.page.palette import STYLES, TEXTURES, TILE, style_of
from torchmem_exporter.page.timeline import Column, Timeline, ticks
from torchmem_exporter.page.treemap import Box, squarified
from torchmem_exporter.words import percent, shown, size

NARROW_SHARE = 0.008
"""Of the peak; smaller parts are summed in the narrow one."""
CHART_WIDTH, CHART_HEIGHT = 960, 230
FITS = (300, 340, 420, 520, 640, 800, 960, 1100, 1220, 1500)
"""Widths, in pixels, from which on the labels of each class are shown."""
_MARKS_Y = CHART_HEIGHT + 12
_LETTER, _BOLD_LETTER, _PADDING, _LINE, _DESCENT = 6.9, 7.6, 12, 15, 4
_HEADROOM = 1.06
_NEAR_LIMIT = 1.6
"""Times the highest value; a limit further off would flatten the chart."""
_TEXTURE = Markup('<pattern id="t-{}" width="{}" height="{}" patternUnits="userSpaceOnUse">')
_TEXTURED = Markup('<path d="M0 0h{}v{}H0z" fill="{}"/><path d="{}" class="{}"/></pattern>')
_OUTLINE = Markup('<rect class="o" x="{}%" y="{}" width="{}%" height="{}"/>')
_CELL = Markup('<rect x="{}%" y="{}" width="{}%" height="{}"><title>{} {}: {}, {}</title></rect>')


class _Shape(NamedTuple):
    """How a treemap is laid out."""

    box: Box
    """Its width is one that it may have, its height is its height."""
    num_fits: int
    """Classes of the widths that it can have."""
    num_full: int
    """Those from which on a long label is not shortened."""


_WIDE = _Shape(Box(0, 0, 960, 400), len(FITS), 6)
_NARROW = _Shape(Box(0, 0, 340, 480), 4, 2)


class _Line(NamedTuple):
    """A line of a label."""

    forms: tuple[str, ...]
    """The longest first."""
    is_bold: bool = False


def textures() -> Markup:
    """The definitions that the style sheet's fills refer to, and the timeline's marks."""
    found = Markup("")
    for style in STYLES.values():
        if style.texture != "plain":
            found += _TEXTURE.format(style.name, TILE, TILE)
            kind = "dot" if style.texture == "dots" else "line"
            found += _TEXTURED.format(TILE, TILE, style.colour, TEXTURES[style.texture], kind)
    return found


# -- who holds the peak


def treemap(groups: Sequence[Group], total_bytes: int, *, is_narrow: bool = False) -> Markup:
    """A rectangle for each module and reftype, those of a reftype together."""
    shape = _NARROW if is_narrow else _WIDE
    shown_groups = [_coarse(group, NARROW_SHARE * total_bytes) for group in groups] if is_narrow else groups
    boxes = squarified([group.num_bytes for group in groups], shape.box)
    drawn = (_group(*pair, shape, total_bytes) for pair in zip(shown_groups, boxes, strict=True))
    return Markup("").join(drawn)


def _coarse(group: Group, least_bytes: float) -> Group:
    """The group with its small parts as one."""
    kept = [part for part in group.parts if part.num_bytes >= least_bytes]
    small = group.parts[len(kept) :]
    if len(small) > 1:
        kept.append(Held("(the rest)" if kept else "(all)", sum(part.num_bytes for part in small)))
        return group._replace(parts=tuple(kept))
    return group


def _group(group: Group, box: Box, shape: _Shape, total_bytes: int) -> Markup:
    reftype = shown(group.reftype)
    cells = Markup("")
    boxes = squarified([part.num_bytes for part in group.parts], box)
    for i, (part, cell) in enumerate(zip(group.parts, boxes, strict=True)):
        if cell.width <= 0 or cell.height <= 0:
            continue
        amount, share = size(part.num_bytes), percent(part.num_bytes / total_bytes)
        cells += _CELL.format(*_placed(cell, shape), part.module, reftype, amount, share)
        title = [_Line((reftype,), is_bold=True)] if i == 0 else []
        lines = [*title, _Line(_shortened(part.module)), _Line((f"{amount}, {share}", amount))]
        cells += _labels(lines, cell, shape)
    outline = _OUTLINE.format(*_placed(box, shape))
    return Markup('<g class="{}">{}{}</g>').format(style_of(group.reftype).name, cells, outline)


def _placed(box: Box, shape: _Shape) -> tuple[str, str, str, str]:
    across = 100 / shape.box.width
    return f"{box.x * across:.5g}", f"{box.y:.5g}", f"{box.width * across:.5g}", f"{box.height:.5g}"


def _shortened(module: str) -> tuple[str, ...]:
    """A module's name, and what is left of it where there is little room."""
    last = module.replace(".*", "").rpartition(".")[2]
    return (module,) if last == module else (module, f"\u2026{last}")


def _labels(lines: Sequence[_Line], cell: Box, shape: _Shape) -> Markup:
    """The lines for which there is room."""
    found, x, y = Markup(""), f"{cell.x * 100 / shape.box.width:.5g}", cell.y + 2
    for line in lines:
        fitting = _fitting(line, cell.width / shape.box.width, shape)
        if fitting is None or y + _LINE + _DESCENT > cell.y + cell.height:
            continue
        label, fit = fitting
        y += _LINE
        kind = f"f{fit} b" if line.is_bold else f"f{fit}"
        found += Markup('<text class="{}" x="{}%" y="{}" dx="6">{}</text>').format(kind, x, f"{y:.5g}", label)
    return found


def _fitting(line: _Line, share: float, shape: _Shape) -> tuple[str, int] | None:
    """The longest form that fits soon enough, and the class of the widths from which on; None where none ever does."""
    best: tuple[str, int] | None = None
    for form in line.forms:
        wanted = (len(form) * (_BOLD_LETTER if line.is_bold else _LETTER) + _PADDING) / share
        fit = next((i for i, width in enumerate(FITS[: shape.num_fits]) if wanted <= width), None)
        if fit is not None and (best is None or best[1] >= shape.num_full):
            best = form, fit
    return best


# -- the last steps


def chart(shown_steps: Timeline, baseline_bytes: int | None, limit_bytes: int | None) -> Markup:
    """What each step peak was made of, stacked, and what was left at the step's end, as a line."""
    highest = max(shown_steps.top_bytes, baseline_bytes or 0)
    if limit_bytes is not None and highest <= limit_bytes <= _NEAR_LIMIT * highest:
        highest = limit_bytes
    top = max(1.0, highest * _HEADROOM)
    columns = shown_steps.columns
    return Markup("").join(
        (
            Markup('<svg viewBox="0 0 {0} {1}" width="100%" height="{1}" preserveAspectRatio="none">').format(
                CHART_WIDTH, CHART_HEIGHT
            ),
            *_areas(shown_steps, top),
            Markup('<path class="end h" d="{0}"/><path class="end" d="{0}"/></svg>').format(
                _line([column.end_bytes for column in columns], top)
            ),
            *(_level(value, top, "grid", size(value)) for value in ticks(highest)),
            _level(baseline_bytes, top, "base", "baseline") if baseline_bytes else Markup(""),
            _level(limit_bytes, top, "limit", "limit") if limit_bytes and limit_bytes <= top else Markup(""),
            *_marks(columns),
        )
    )


def _areas(shown_steps: Timeline, top: float) -> Iterator[Markup]:
    """One area for each reftype, the uppermost first, so that each hides what belongs to those below it."""
    sums = [0] * len(shown_steps.columns)
    drawn = []
    for i, reftype in enumerate(shown_steps.reftypes):
        sums = [held + column.parts[i] for held, column in zip(sums, shown_steps.columns, strict=True)]
        drawn.append((style_of(reftype).name, _line(sums, top)))
    for name, line in reversed(drawn):
        yield Markup('<path class="a {}" d="{}V{}H0z"/>').format(name, line, CHART_HEIGHT)


def _line(values: Sequence[int], top: float) -> str:
    """A path with a step for each value."""
    commands, before_x, before_y = [], 0, None
    for i, value in enumerate(values):
        x, y = round((i + 1) * CHART_WIDTH / len(values)), _y(value, top)
        if before_y is None:
            commands.append(f"M0 {y}")
        elif y != before_y:
            commands.append(f"v{y - before_y}")
        commands.append(f"h{x - before_x}")
        before_x, before_y = x, y
    return _without_repeats(commands)


def _without_repeats(commands: Sequence[str]) -> str:
    """The same path with one piece for those that go on in the same direction."""
    joined: list[str] = []
    for command in commands:
        if joined and command[0] == "h" == joined[-1][0]:
            joined[-1] = f"h{int(joined[-1][1:]) + int(command[1:])}"
        else:
            joined.append(command)
    return "".join(joined)


def _y(value: float, top: float) -> int:
    return round(CHART_HEIGHT * (1 - min(value, top) / top))


def _level(value: float, top: float, kind: str, text: str) -> Markup:
    y = _y(value, top)
    label = Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
        kind, "100%" if kind != "grid" else "0", y - 4, text
    )
    return Markup('<line class="{}" x2="100%" y1="{}" y2="{}"/>').format(kind, y, y) + label


def _marks(columns: Sequence[Column]) -> Iterator[Markup]:
    for i, column in enumerate(columns):
        x = f"{(i + 0.5) * 100 / len(columns):.4g}"
        if column.num_ooms:
            yield Markup('<line class="oom" x1="{0}%" x2="{0}%" y2="{1}"/>').format(x, CHART_HEIGHT)
        for mark in _marks_of(column):
            yield Markup('<use href="#m-{}" x="{}%" y="{}"/>').format(mark, x, _MARKS_Y)


def _marks_of(column: Column) -> Iterator[str]:
    if column.num_ooms:
        yield "oom"
    elif column.phases & Phase.CHECKPOINT:
        yield "checkpoint"
    elif column.phases & Phase.EVAL:
        yield "eval"
