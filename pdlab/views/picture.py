"""A picture as a list of shapes: what a view-model is, before anybody draws it.

A browser draws it (figure.js); so do `svg` and `png`, for Git hosts, untrusted clones and pages without a kernel.
Shapes carry roles, not colours: the theme gives each role its colour, one in light and one in dark.
"""

import functools
import io
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

# (light, dark). P is orange, D blue, the proxy grey: told apart by colour-blind eyes too.
THEME = {
    "proxy": ("#5f6b7a", "#a3afbf"),
    "P": ("#b8530a", "#f5a35c"),
    "D": ("#1d5fbf", "#82b4ff"),
    "text": ("#1c2430", "#e6eaf0"),
    "muted": ("#5d6773", "#9aa4b2"),
    "line": ("#c3cad3", "#4a5462"),
    "ground": ("#ffffff", "#16191d"),
    "equal": ("#1a7f4b", "#5fd39a"),
    "unequal": ("#b3261e", "#ff8a80"),
}
FONT = "'DejaVu Sans', ui-sans-serif, 'Segoe UI', sans-serif"
ALWAYS = 10**6  # a step that no journey comes to


@dataclass(frozen=True)
class Shape:
    """Attributes:
    kind: "rect", "line", "arrow" or "text".
    at: x, y; then width and height of a rect, x and y of the other end of a line or an arrow; in CSS pixels.
    role: whose it is, a key of THEME.
    label: what a text says; what a pointer over another shape reads.
    fill: of a rect: "solid", "soft" (see-through), "hatch" (waiting) or "none" (its outline).
    size: of a text in pixels; thickness of a line. bold: of a text. anchor: "start", "middle" or "end".
    step: index of the journey's step that it stands for: lit when that is the current one.
    since, until: indices of the steps between which it is there.
    name: by which a click on it chooses it.
    """

    kind: str
    at: tuple[float, ...]
    role: str = "text"
    label: str = ""
    fill: str = "solid"
    size: float = 13
    bold: bool = False
    anchor: str = "start"
    step: int | None = None
    since: int = 0
    until: int = ALWAYS
    name: str = ""


@dataclass
class Picture:
    """Attributes:
    width, height: in CSS pixels.
    line: all of it in one line of words: its text form.
    """

    width: int
    height: int
    line: str
    shapes: list[Shape] = field(default_factory=list)

    def add(self, kind: str, *at: float, **of: Any) -> None:
        """Add a shape; see `Shape`."""
        self.shapes.append(Shape(kind, tuple(round(float(value), 1) for value in at), **of))

    def text(self, x: float, y: float, label: str, **of: Any) -> None:
        self.add("text", x, y, label=label, **of)

    def as_dict(self) -> dict[str, Any]:
        """For figure.js; what is as usual is left out."""
        usual = asdict(Shape("", ()))
        shapes = [{k: v for k, v in asdict(shape).items() if v != usual[k] or k == "kind"} for shape in self.shapes]
        return {"width": self.width, "height": self.height, "line": self.line, "shapes": shapes}

    def at_step(self, step: int) -> list[Shape]:
        """The shapes that are there at that step."""
        return [shape for shape in self.shapes if shape.since <= step <= shape.until]

    def svg(self, step: int = ALWAYS - 1, dark: bool = False) -> str:
        """As it is at `step`; as at the end by default."""
        ground = THEME["ground"][dark]
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="{FONT}">',
            f"<title>{escape(self.line)}</title>",
            _HATCHES[dark],
            f'<rect width="{self.width}" height="{self.height}" fill="{ground}"/>',
        ]
        parts += [_SVG[shape.kind](shape, THEME[shape.role][dark]) for shape in self.at_step(step)]
        return "".join([*parts, "</svg>"])

    def png(self, step: int = ALWAYS - 1, dark: bool = False, scale: int = 2) -> bytes:
        """The same as PNG, for where SVG is not shown."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width * scale, self.height * scale), THEME["ground"][dark])
        draw = ImageDraw.Draw(image, "RGBA")
        for shape in self.at_step(step):
            _PNG[shape.kind](draw, shape, THEME[shape.role][dark], scale)
        file = io.BytesIO()
        image.quantize(64).save(file, "PNG", optimize=True)
        return file.getvalue()


# As SVG ---------------------------------------------------------------------------------------------------------------


def _hatches(dark: bool) -> str:
    patterns = (
        f'<pattern id="hatch-{role}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><line y2="6" stroke="{colours[dark]}" stroke-width="2.5"/></pattern>'
        for role, colours in THEME.items()
    )
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return f'<defs>{"".join(patterns)}{head}<path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>'


_HATCHES = (_hatches(False), _hatches(True))


def _rect(shape: Shape, colour: str) -> str:
    x, y, width, height = shape.at
    paint = {
        "solid": f'fill="{colour}"',
        "soft": f'fill="{colour}" fill-opacity=".16" stroke="{colour}"',
        "hatch": f'fill="url(#hatch-{shape.role})" stroke="{colour}"',
        "none": f'fill="none" stroke="{colour}"',
    }[shape.fill]
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" {paint}>{_title(shape)}</rect>'


def _line(shape: Shape, colour: str) -> str:
    x1, y1, x2, y2 = shape.at
    end = ' marker-end="url(#head)"' if shape.kind == "arrow" else ""
    thick = shape.size if shape.size != 13 else 1.2
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="{thick:g}"{end}>'
        f"{_title(shape)}</line>"
    )


def _text(shape: Shape, colour: str) -> str:
    x, y = shape.at
    bold = ' font-weight="600"' if shape.bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{shape.size:g}" text-anchor="{shape.anchor}" fill="{colour}"{bold}>'
        f"{escape(shape.label)}</text>"
    )


def _title(shape: Shape) -> str:
    return f"<title>{escape(shape.label)}</title>" if shape.label else ""


_SVG = {"rect": _rect, "line": _line, "arrow": _line, "text": _text}


# As PNG ---------------------------------------------------------------------------------------------------------------


def _rgba(colour: str, alpha: int) -> tuple[int, ...]:
    return (*(int(colour[i : i + 2], 16) for i in (1, 3, 5)), alpha)


def _png_rect(draw: Any, shape: Shape, colour: str, scale: int) -> None:
    x, y, width, height = (value * scale for value in shape.at)
    box = (x, y, x + max(width, 1), y + max(height, 1))
    fill = {"solid": 255, "soft": 40, "hatch": 0, "none": 0}[shape.fill]
    draw.rectangle(box, fill=_rgba(colour, fill) if fill else None, outline=colour if fill < 255 else None, width=scale)
    if shape.fill == "hatch":
        gap = 6 * scale
        for start in range(int(x - height), int(x + width), gap):
            low, high = max(start, x), min(start + height, x + width)
            if low < high:
                draw.line(
                    (low, y + height - (low - start), high, y + height - (high - start)), fill=colour, width=scale
                )


def _png_line(draw: Any, shape: Shape, colour: str, scale: int) -> None:
    x1, y1, x2, y2 = (value * scale for value in shape.at)
    thick = shape.size if shape.size != 13 else 1.2
    draw.line((x1, y1, x2, y2), fill=colour, width=max(1, round(thick * scale)))
    if shape.kind == "arrow":
        length = max(1.0, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
        along = ((x2 - x1) / length * 6 * scale, (y2 - y1) / length * 6 * scale)
        across = (-along[1] / 2, along[0] / 2)
        back = (x2 - along[0], y2 - along[1])
        tips = [(x2, y2), (back[0] + across[0], back[1] + across[1]), (back[0] - across[0], back[1] - across[1])]
        draw.polygon(tips, fill=colour)


# The font that Pillow brings has none of these.
_PLAIN = str.maketrans({"→": "->", "×": "x", "≠": "!=", "\u2013": "-", "…": "...", "\u2212": "-", "·": "-", "✗": "x"})


def _png_text(draw: Any, shape: Shape, colour: str, scale: int) -> None:
    x, y = (value * scale for value in shape.at)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
    font, has_all = _font(round(shape.size * scale), shape.bold)
    label = shape.label if has_all else shape.label.translate(_PLAIN)
    draw.text((x, y), label, fill=colour, font=font, anchor=anchor)


@functools.cache
def _font(size: int, bold: bool) -> tuple[Any, bool]:
    """A font, and whether it has the signs we use: DejaVu where the system has it, else Pillow's own."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype(f"DejaVuSans{'-Bold' if bold else ''}.ttf", size), True
    except OSError:
        return ImageFont.load_default(size), False


_PNG = {"rect": _png_rect, "line": _png_line, "arrow": _png_line, "text": _png_text}
