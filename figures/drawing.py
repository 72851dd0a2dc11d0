"""What the drawings share: a page measured in inches, the shapes on it, the two files it becomes.

Colours, fonts and letters as outlines come from `inkling_ref.notebook`: the style of the notebooks' figures.
"""

from pathlib import Path

from matplotlib import rcParams
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch

from inkling_ref.notebook import COLOURS

rcParams["figure.constrained_layout.use"] = False  # here everything has its place
INK, PLAIN = "#22262b", COLOURS["grey"]
FULL = COLOURS["attention"]  # sliding layers are a lighter shade of it


def tint(colour: str, strength: float) -> tuple[float, ...]:
    """The colour mixed with white."""
    return tuple(1 - strength * (1 - c) for c in to_rgb(colour))


SLIDING = to_hex(tint(FULL, 0.6))


def save(figure: Figure, script: str) -> None:
    """make_NAME.py's figure as NAME.svg and NAME.png beside it, the same bytes every time."""
    path = Path(script)
    for suffix, options in {".png": {"dpi": 200}, ".svg": {"metadata": {"Date": None}}}.items():
        figure.savefig(path.with_name(path.stem.removeprefix("make_") + suffix), **options)


class Page:
    """A figure whose coordinates are inches from its lower left corner. Boxes are given by theirs."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def _rectangle(self, x, y, width, height, corner, **style) -> None:
        shape = f"round,pad=0,rounding_size={corner}"
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))

    def label(self, x, y, text, size=10.0, colour=INK, align="center", weight="normal", rotation=0) -> None:
        self.axes.text(
            x, y, text, fontsize=size, color=colour, ha=align, va="center", weight=weight, rotation=rotation,
            linespacing=1.25, zorder=5,
        )  # fmt: skip

    def box(self, x, y, width, height, text="", colour=PLAIN, strength=0.2, size=10.0, edge=1.2) -> None:
        self._rectangle(
            x, y, width, height, 0.07, facecolor=tint(colour, strength), edgecolor=colour, linewidth=edge, zorder=3
        )
        self.label(x + width / 2, y + height / 2, text, size)

    def panel(self, x, y, width, height, title, colour=PLAIN) -> None:
        style = {"facecolor": tint(colour, 0.045), "edgecolor": tint(colour, 0.55)}
        self._rectangle(x, y, width, height, 0.12, linewidth=1, zorder=0, **style)
        self.label(x + width / 2, y + height - 0.24, title, size=11.5, weight="bold")

    def line(self, *points, colour=INK, width=1.3) -> None:
        style = {"solid_joinstyle": "round", "solid_capstyle": "butt"}
        self.axes.plot(*zip(*points, strict=True), color=colour, lw=width, zorder=2, **style)

    def arrow(self, *points, colour=INK, width=1.3) -> None:
        """A line through the points, with a head at its end."""
        if len(points) > 2:
            self.line(*points[:-1], colour=colour, width=width)
        self.axes.annotate(
            "", points[-1], points[-2], zorder=2,
            arrowprops={"arrowstyle": "-|>,head_length=0.5,head_width=0.25", "color": colour, "lw": width,
                        "mutation_scale": 10 + 2 * width, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip

    def dot(self, x, y, colour, radius=0.045) -> None:
        self.axes.add_patch(Circle((x, y), radius, facecolor=colour, edgecolor="white", linewidth=0.6, zorder=4))

    def plus(self, x, y) -> None:
        self.axes.add_patch(Circle((x, y), 0.11, facecolor="white", edgecolor=INK, linewidth=1.2, zorder=4))
        self.label(x, y, "+", size=11)
