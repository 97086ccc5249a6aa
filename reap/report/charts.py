"""Small SVG charts: axes, lines, bars, dots. They know nothing of experts or plans.

Made by hand because SVG with CSS variables follows dark mode and print, works without scripts and
adds 2 to 40 kB a chart, where Vega or Bokeh inline about 1 MB that does neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from reap.formatting import tick

NARROW, WIDE = 480, 980

Point = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A chart and the legend (CSS class, name) that stands above it."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    wide: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels; values outside are moved to its ends. `whole` has integer ticks."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        if self.log:
            return self._log_ticks(about)
        raw = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if raw <= m * power * 1.0001)
        if self.whole:
            step = max(math.ceil(step), 1)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = math.log10(self.high / self.low)
        multiples = (1,) if decades > 2.2 else (1, 3) if decades > 1.2 else (1, 2, 3, 5, 7)
        step = max(1, math.ceil(decades / (about + 1)))
        values = [m * 10.0**e for e in range(first, last + 1, step) for m in multiples]
        shown = [v for v in values if self.low * 0.999 <= v <= self.high * 1.001]
        return shown if len(shown) > 1 else [self.low, self.high]


def spread(
    values: Sequence[float], *, log: bool = False, zero: bool = False
) -> tuple[float, float]:
    """A range with a margin that holds the finite (for log: positive) values."""
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not usable:
        return (1e-3, 1.0) if log else (0.0, 1.0)
    low, high = min(usable), max(usable)
    if log:
        return low / 1.25, high * 1.25
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if zero else low - margin), high + margin


@dataclass(frozen=True)
class Line:
    """A series of a line chart; `dots` are marked and carry their tips when hovered."""

    name: str
    points: Sequence[Point]
    css: str
    dashed: bool = False
    dots: bool = False
    tips: Sequence[str] = ()


@dataclass(frozen=True)
class Reference:
    """A straight line across the chart at one value; only dot charts print its label."""

    value: float
    label: str = ""
    css: str = "reference"
    vertical: bool = False


@dataclass(frozen=True)
class Stack:
    """One layer of a stacked bar chart."""

    name: str
    css: str
    values: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A value with an optional standard error half-width, drawn `shift` pixels below its row."""

    value: float
    css: str
    tip: str
    error: float = 0.0
    shift: float = 0.0


@dataclass(frozen=True)
class Row:
    """A labelled row of a dot chart; `note` stands behind its last bar."""

    label: str
    dots: Sequence[Dot]
    note: str = ""


@dataclass(frozen=True)
class Frame:
    """Names and size of a chart."""

    title: str
    description: str
    x_label: str = ""
    y_label: str = ""
    width: int = NARROW
    height: int = 270


@dataclass
class _Canvas:
    frame: Frame
    marks: list[Markup] = field(default_factory=list)

    def add(self, *marks: Markup) -> None:
        self.marks.extend(marks)

    def done(self) -> Markup:
        frame = self.frame
        return tag(
            "svg",
            tag("title", frame.title)
            + tag("desc", frame.description)
            + Markup("").join(self.marks),
            viewBox=f"0 0 {frame.width} {frame.height}",
            role="img",
            aria_label=f"{frame.title}. {frame.description}",
            class_="wide" if frame.width == WIDE else "narrow",
        )


def tag(name: str, content: str = "", /, **attributes: object) -> Markup:
    """An element with escaped attributes and (unless it is Markup) escaped content."""

    def text(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.1f}".removesuffix(".0")
        return str(value)

    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-") if key != "viewBox" else key}="{escape(text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{escape(content)}</{name}>")


def _text(x: float, y: float, content: str, css: str = "tick", anchor: str | None = None) -> Markup:
    return tag("text", content, x=float(x), y=float(y), class_=css, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=css)


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _axes(
    canvas: _Canvas,
    x: Axis,
    y: Axis,
    *,
    x_ticks: bool = True,
    x_format: Callable[[float], str] = tick,
    y_format: Callable[[float], str] = tick,
) -> None:
    frame = canvas.frame
    for value in y.ticks():
        at = y(value)
        canvas.add(_line(x.start, at, x.end, at, "grid"))
        canvas.add(_text(x.start - 6, at + 4, y_format(value), "tick", "end"))
    if x_ticks:
        # Four labels of the width of "0.001" fit into the narrow chart without touching.
        for value in x.ticks(5 if frame.width == NARROW else 10):
            at = x(value)
            canvas.add(_line(at, y.start, at, y.start + 4, "axis"))
            canvas.add(_text(at, y.start + 17, x_format(value), "tick", "middle"))
    canvas.add(_line(x.start, y.start, x.end, y.start, "axis"))
    _axis_names(canvas, x, y)


def _axis_names(canvas: _Canvas, x: Axis, y: Axis) -> None:
    frame = canvas.frame
    if frame.x_label:
        canvas.add(_text((x.start + x.end) / 2, frame.height - 5, frame.x_label, "name", "middle"))
    if frame.y_label:
        canvas.add(_text(2, 12, frame.y_label, "name"))


def _plot(frame: Frame) -> tuple[float, float, float, float]:
    """Left, right, bottom and top pixel of the plotting area."""
    return 52.0, frame.width - 20.0, frame.height - 42.0, 26.0


def lines(
    frame: Frame,
    series: Sequence[Line],
    *,
    x: tuple[float, float],
    y: tuple[float, float],
    log_y: bool = False,
    log_x: bool = False,
    whole_x: bool = False,
    references: Sequence[Reference] = (),
    x_format: Callable[[float], str] = tick,
    y_format: Callable[[float], str] = tick,
) -> Markup:
    """Line chart; points that a log axis cannot show are left out."""
    left, right, bottom, top = _plot(frame)
    across, up = Axis(*x, left, right, log_x, whole_x), Axis(*y, bottom, top, log_y)
    canvas = _Canvas(frame)
    _axes(canvas, across, up, x_format=x_format, y_format=y_format)
    for reference in references:
        if reference.vertical:
            at = across(reference.value)
            canvas.add(_line(at, bottom, at, top, reference.css))
        else:
            at = up(reference.value)
            canvas.add(_line(left, at, right, at, reference.css))
    for one in series:
        shown = [
            (i, p)
            for i, p in enumerate(one.points)
            if math.isfinite(p[1]) and (p[1] > 0 or not log_y) and (p[0] > 0 or not log_x)
        ]
        placed = [(across(px), up(py)) for _, (px, py) in shown]
        if len(placed) > 1:
            css = f"line {one.css}" + (" dashed" if one.dashed else "")
            hover = tag("title", one.name) if one.name else Markup("")
            canvas.add(tag("path", hover, d=_path(placed), class_=css))
        if one.dots:
            for (i, _), (px, py) in zip(shown, placed, strict=True):
                tip = one.tips[i] if one.tips else one.name
                canvas.add(_dot(px, py, one.css, tip))
    return canvas.done()


def _dot(x: float, y: float, css: str, tip: str, radius: float = 3.5) -> Markup:
    return tag("circle", tag("title", tip), cx=float(x), cy=float(y), r=radius, class_=f"dot {css}")


def bars(
    frame: Frame,
    categories: Sequence[str],
    stacks: Sequence[Stack],
    tips: Sequence[str],
    *,
    reference: Reference | None = None,
    y_max: float | None = None,
    y_format: Callable[[float], str] = tick,
) -> Markup:
    """Stacked vertical bars, one for each category, with their totals where there is room."""
    left, right, bottom, top = _plot(frame)
    totals = [sum(stack.values[i] for stack in stacks) for i in range(len(categories))]
    peak = y_max or max([*totals, reference.value if reference else 0.0, 1e-9]) * 1.08
    across, up = Axis(0, 1, left, right), Axis(0, peak, bottom, top)
    canvas = _Canvas(frame)
    _axes(canvas, across, up, x_ticks=False, y_format=y_format)
    pitch = (right - left) / len(categories)
    width = min(pitch * 0.78, 44.0)
    room = 9 * max(len(name) for name in categories) + 8
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * pitch >= room or n == 1000)
    for i, category in enumerate(categories):
        middle = left + (i + 0.5) * pitch
        base = 0.0
        parts = []
        for stack in stacks:
            value = stack.values[i]
            if value > 0:
                y0, y1 = up(base), up(base + value)
                parts.append(
                    tag("rect", x=middle - width / 2, y=y1, width=width, height=y0 - y1,
                        class_=stack.css)
                )  # fmt: skip
            base += value
        target = tag("rect", x=middle - pitch / 2, y=top, width=pitch, height=bottom - top,
                     class_="target")  # fmt: skip
        canvas.add(tag("g", tag("title", tips[i]) + Markup("").join([*parts, target])))
        if i % every == 0:
            canvas.add(_text(middle, bottom + 17, category, "tick", "middle"))
        if pitch >= 7.5 * len(tick(peak)) + 4 and totals[i]:
            canvas.add(_text(middle, up(totals[i]) - 5, tick(totals[i]), "value", "middle"))
    if reference is not None:
        at = up(reference.value)
        canvas.add(_line(left, at, right, at, reference.css))
    return canvas.done()


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _name(x: float, y: float, text: str, limit: int, anchor: str | None) -> Markup:
    """A label; one that is cut has its whole text as a tip."""
    if len(text) <= limit:
        return _text(x, y, text, "row", anchor)
    content = Markup(escape(_shorten(text, limit))) + tag("title", text)
    return tag("text", content, x=float(x), y=float(y), class_="row", text_anchor=anchor)


def _band_rows(spans: Sequence[tuple[float, str]], left: float, right: float) -> list[Point]:
    """Where to centre each (middle, name) above the chart: x, and a row so that none overlap."""
    ends: list[float] = []
    places = []
    for middle, name in spans:
        half = 3.1 * len(name)
        x = min(max(middle, left + half), max(right - half, left + half))
        row = next((i for i, end in enumerate(ends) if x - half > end + 6), len(ends))
        ends[row : row + 1] = [x + half]
        places.append((x, float(row)))
    return places


def dots(
    frame: Frame,
    rows: Sequence[Row],
    *,
    x: tuple[float, float],
    log: bool = False,
    bands: Sequence[tuple[float, float, str]] = (),
    joined: bool = False,
    bars_from_zero: bool = False,
    reference: Reference | None = None,
    x_format: Callable[[float], str] = tick,
) -> Markup:
    """Horizontal rows of dots with error bars; `joined` connects a row's dots."""
    limit = 26 if frame.width == NARROW else 48
    left = 24 + 7.0 * min(max(len(row.label) for row in rows), limit)
    right = frame.width - 22 - 7.0 * max(len(row.note) for row in rows)
    shades = []
    beyond = Axis(*x, left, right, log)
    for low, high, name in bands:
        if high > beyond.low and low < beyond.high:
            ends = beyond(max(low, beyond.low)), beyond(min(high, beyond.high))
            shades.append((*ends, name))
    places = _band_rows([((a + b) / 2, name) for a, b, name in shades], left, frame.width - 4.0)
    top = 24.0 + 13 * max((row for _, row in places), default=0) if bands or reference else 8.0
    pitch = 30
    height = int(top + pitch * len(rows) + 44)
    frame = Frame(frame.title, frame.description, frame.x_label, "", frame.width, height)
    bottom = height - 42.0
    across = Axis(*x, left, right, log)
    canvas = _Canvas(frame)
    for (x0, x1, name), (at, row) in zip(shades, places, strict=True):
        canvas.add(tag("rect", x=x0, y=top - 4, width=x1 - x0, height=bottom - top + 4,
                       class_="band"))  # fmt: skip
        canvas.add(_text(at, top - 9 - 13 * row, name, "label", "middle"))
    for value in across.ticks(5):
        at = across(value)
        canvas.add(_line(at, top - 4, at, bottom, "grid"))
        canvas.add(_text(at, bottom + 17, x_format(value), "tick", "middle"))
    canvas.add(_line(left, bottom, across.end, bottom, "axis"))
    _axis_names(canvas, across, Axis(0, 1, bottom, top))
    if reference is not None:
        at = across(reference.value)
        canvas.add(_line(at, top - 4, at, bottom, reference.css))
        anchor = "end" if at > (left + across.end) / 2 else "start"
        canvas.add(_text(at, top - 9, reference.label, "label", anchor))
    for index, one in enumerate(rows):
        y = top + pitch * (index + 0.5)
        canvas.add(_name(left - 10, y + 4, one.label, limit, "end"))
        shown = [d for d in one.dots if math.isfinite(d.value)]
        if joined and len(shown) > 1:
            a, b = shown[0], shown[-1]
            canvas.add(_line(across(a.value), y + a.shift, across(b.value), y + b.shift, "join"))
        for dot in shown:
            if bars_from_zero:
                canvas.add(tag("rect", tag("title", dot.tip), x=left, y=y - 8,
                               width=max(across(dot.value) - left, 1.0), height=16.0,
                               class_=dot.css))  # fmt: skip
                continue
            if math.isfinite(dot.error) and dot.error > 0:
                low = across(max(dot.value - dot.error, across.low))
                canvas.add(_line(low, y, across(dot.value + dot.error), y, f"error {dot.css}"))
            canvas.add(_dot(across(dot.value), y + dot.shift, dot.css, dot.tip, 5.0))
            if dot.value < across.low:
                canvas.add(_text(across.start + 9, y + dot.shift + 4, "≤", "row"))
        if shown and one.note:
            end = across(max(dot.value for dot in shown))
            canvas.add(_text(end + 8, y + 4, one.note, "value"))
    return canvas.done()


@dataclass(frozen=True)
class Mark:
    """A named point of a scatter chart."""

    x: float
    y: float
    error: float
    label: str
    css: str
    tip: str


def scatter(
    frame: Frame,
    marks: Sequence[Mark],
    *,
    x: tuple[float, float],
    y: tuple[float, float],
    bands: Sequence[tuple[float, float, str]] = (),
    log_x: bool = False,
    diagonal: bool = False,
) -> Markup:
    """Points on a log y axis, each with an error bar and its name beside it.

    One that is below an axis stands at its end with "≤" before its name. `diagonal`: where both
    axes have the same value.
    """
    left, right, bottom, top = 60.0, frame.width - 16.0, frame.height - 44.0, 28.0
    across, up = Axis(*x, left, right, log_x), Axis(*y, bottom, top, True)
    canvas = _Canvas(frame)
    labelled = math.inf
    taken: list[tuple[float, float, float]] = []
    for low, high, name in bands:
        if high <= up.low or low >= up.high:
            continue
        y0, y1 = up(max(low, up.low)), up(min(high, up.high))
        canvas.add(tag("rect", x=left, y=y1, width=right - left, height=y0 - y1, class_="band"))
        labelled = min(y1 + 13, labelled - 12)
        canvas.add(_text(right - 6, labelled, name, "label", "end"))
        taken.append((right - 12 - 5.6 * len(name), right, labelled))
    _axes(canvas, across, up)
    first, last = max(across.low, up.low), min(across.high, up.high)
    if diagonal and first < last:
        canvas.add(_line(across(first), up(first), across(last), up(last), "reference"))
    # Names keep clear of every dot, of the bands' names and of each other.
    taken += [(across(m.x) - 8, across(m.x) + 8, up(m.y) + 4) for m in marks]
    names = []
    for mark in sorted(marks, key=lambda m: (-m.y, m.x, m.label)):
        px, py = across(mark.x), up(mark.y)
        if math.isfinite(mark.error) and mark.error > 0:
            low = up(max(mark.y - mark.error, up.low))
            canvas.add(_line(px, low, px, up(mark.y + mark.error), f"error {mark.css}"))
        canvas.add(_dot(px, py, mark.css, mark.tip, 6.0))
        below = mark.x < across.low or mark.y < up.low
        label = f"≤ {mark.label}" if below else mark.label
        names.append(_place_name(label, px, py, taken, left, right))
    canvas.add(*names)
    return canvas.done()


def _place_name(
    label: str,
    x: float,
    y: float,
    taken: list[tuple[float, float, float]],
    left: float,
    right: float,
) -> Markup:
    """The mark's name right or left of it, moved down until it covers nothing."""
    limit = 48
    width = 6.9 * min(len(label), limit)
    to_right = x + 12 + width < right or x - 12 - width < left
    x0 = x + 12 if to_right else x - 12 - width
    at = y + 4
    while any(abs(at - y1) < 15 and x0 < b and a < x0 + width for a, b, y1 in taken):
        at += 3
    taken.append((x0, x0 + width, at))
    side = 12 if to_right else -12
    name = _name(x + side, at, label, limit, None if to_right else "end")
    if at - y > 12:
        side = 9 if to_right else -9
        name = _line(x, y, x + side, at - 4, "leader") + name
    return Markup(name)


def stacked_bar(frame: Frame, parts: Sequence[tuple[str, str, float, str]]) -> Markup:
    """One horizontal bar of (name, CSS class, size, tip); labels stand in the parts that fit."""
    canvas = _Canvas(frame)
    total = sum(size for _, _, size, _ in parts) or 1.0
    at = 0.0
    for name, css, size, tip in parts:
        width = frame.width * size / total
        if width <= 0:
            continue
        rect = tag("rect", x=at, y=0.0, width=max(width - 1.5, 0.5), height=float(frame.height),
                   class_=css)  # fmt: skip
        label = (
            _text(at + width / 2, frame.height / 2 + 5, name, "inside", "middle")
            if width > 7.5 * len(name) + 12
            else Markup("")
        )
        canvas.add(tag("g", tag("title", tip) + rect + label, class_=f"part {css}"))
        at += width
    return canvas.done()
