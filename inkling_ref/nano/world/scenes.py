"""Scenes: coloured shapes on a background, as a description and as a picture.

`make_scene` draws a description at random; `draw` makes the picture with Pillow. The description is the ground truth:
everything asked about a scene is computed from it, so it leaves no doubt about what can be seen. Shapes do not touch,
colours of different names keep apart in RGB and from the background, an ellipse is clearly no circle and a rectangle
clearly no square.

Coordinates are pixels, x to the right, y down, continuous: the centre of the top left pixel is (0.5, 0.5).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from ...vision import BOARD_DARK, BOARD_LIGHT, BOARD_SQUARE

TILE = 40  # pixels a side of one tile = one token
RGB = tuple[int, int, int]

# Variants of a colour, the CSS colour of that name first, and how far each channel may stray from them.
COLOURS: dict[str, tuple[tuple[RGB, ...], int]] = {
    "red": (((255, 0, 0), (220, 20, 40), (235, 40, 40), (210, 0, 0)), 12),
    "orange": (((255, 165, 0), (255, 140, 0), (245, 135, 30)), 12),
    "yellow": (((255, 255, 0), (255, 230, 20), (240, 225, 40), (255, 240, 90)), 12),
    "green": (((0, 128, 0), (0, 160, 60), (34, 139, 34), (50, 205, 50), (0, 255, 0), (0, 100, 0)), 15),
    "blue": (((0, 0, 255), (65, 105, 225), (30, 60, 180), (30, 144, 255), (0, 0, 150)), 15),
    "purple": (((128, 0, 128), (148, 0, 211), (138, 43, 226), (150, 60, 180)), 12),
    "pink": (((255, 192, 203), (255, 105, 180), (255, 150, 190), (250, 170, 200)), 12),
    "brown": (((165, 42, 42), (139, 69, 19), (120, 72, 35), (150, 75, 0), (101, 67, 33)), 8),
    "black": (((0, 0, 0), (15, 15, 15)), 10),
    "grey": (((128, 128, 128), (105, 105, 105), (150, 150, 150), (169, 169, 169)), 8),
    "white": (((255, 255, 255), (245, 245, 245)), 8),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ellipse", "rectangle")
SMALL, LARGE = 22, 29  # longest side in pixels: up to SMALL is small, from LARGE is large, between is never asked
MAX_THINGS = 6
CONTRAST = 65  # least RGB distance of a thing from its background
GAP = 2.0  # least pixels between two things and to the picture's border


@dataclass(slots=True)
class Thing:
    """One shape.

    size: longest side before rotation; polygon: its outline around (x, y), already rotated; half_width, half_height:
    of the bounding box, lines included; x, y: its centre; style: fill, lined (a thin dark or light line) or hollow.
    """

    shape: str
    colour: str
    rgb: RGB
    size: float
    polygon: np.ndarray
    half_width: float
    half_height: float
    style: str = "fill"
    line: float = 0.0  # width of the line
    line_rgb: RGB = (0, 0, 0)
    x: float = 0.0
    y: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(slots=True)
class Background:
    """A plain colour, or a gradient between two, with a faint pattern and noise on it."""

    first: RGB
    second: RGB | None = None
    direction: tuple[float, float] = (1.0, 0.0)
    pattern: str | None = None  # rows, columns, checks or diagonals
    period: int = 8
    depth: int = 0  # levels that the pattern adds
    noise: int = 0  # levels, standard deviation
    noise_over_all: bool = False  # the things are noisy too
    noise_origin: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Scene:
    """things do not overlap; smooth: drawn anti-aliased."""

    width: int
    height: int
    background: Background
    things: list[Thing]
    smooth: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.height // TILE), -(-self.width // TILE)


def make_scene(rng: Random, max_tiles: int, large: bool = False) -> Scene:
    """A scene of at most `max_tiles` tiles; `large` ones reach several hundred pixels. One in seventy is empty."""
    wanted = 0 if rng.random() < 0.015 else 1
    while True:
        scene = _any_scene(rng, max_tiles, large, wanted)
        if not wanted or scene.things:
            return scene


def _any_scene(rng: Random, max_tiles: int, large: bool, least: int) -> Scene:
    """A scene of some things, or none if `least` is 0; things that found no place are missing from it."""
    width, height = _picture_size(rng, max_tiles, large)
    background = _background(rng)
    palette = _palette(rng, background)
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 2, 3, 3, 4, 5, 7)))
    room = width * height
    limit = max(1, min(MAX_THINGS, room // 1900))
    number = rng.randint(1, limit) if rng.random() < 0.6 else rng.randint(min(3, limit), limit)
    sizes = _sizes(rng, width, height, number if least else 0)
    style = "fill" if rng.random() < 0.75 else rng.choice(("lined", "hollow", "mixed"))
    upright = rng.random() < 0.5
    things = []
    for size in sizes:
        colour = rng.choice(palette)
        things.append(_make_thing(rng, rng.choice(shapes), colour, size, style, upright, background))
    return Scene(width, height, background, _place(rng, things, width, height), smooth=rng.random() < 0.72)


# Description


def _picture_size(rng: Random, max_tiles: int, large: bool) -> tuple[int, int]:
    while True:
        if large:
            width, height = rng.randint(120, 480), rng.randint(80, 400)
        elif rng.random() < 0.12:  # long and narrow
            width, height = rng.randint(100, 280), rng.randint(40, 70)
        else:
            width, height = rng.randint(40, 240), rng.randint(40, 180)
        if rng.random() < 0.2:
            width, height = height, width
        if rng.random() < 0.15:
            width = height = min(width, height)
        if rng.random() < 0.55:
            width, height = round(width / TILE) * TILE, round(height / TILE) * TILE
        elif rng.random() < 0.4:
            width, height = round(width / 10) * 10, round(height / 10) * 10
        if -(-width // TILE) * -(-height // TILE) <= max_tiles:
            return width, height


def _near(rng: Random, rgb: RGB, jitter: int) -> RGB:
    if jitter == 0:
        return rgb
    return tuple(min(255, max(0, level + rng.randint(-jitter, jitter))) for level in rgb)


def _background(rng: Random) -> Background:
    kind = rng.random()
    if kind < 0.02:  # the checkerboard that transparent pixels become
        return Background((BOARD_LIGHT,) * 3, pattern="checks", period=BOARD_SQUARE, depth=BOARD_DARK - BOARD_LIGHT)
    if kind < 0.25:
        first = (255, 255, 255)
    elif kind < 0.55:  # light
        base = rng.randint(205, 250)
        first = _near(rng, (base, base, base), rng.choice((0, 6, 20)))
    elif kind < 0.85:  # dark
        base = rng.choice((0, rng.randint(10, 70)))
        first = _near(rng, (base, base, base), rng.choice((0, 8, 24)) if base else 0)
    else:
        first = (rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255))
    background = Background(first)
    if rng.random() < 0.5:
        return background
    if rng.random() < 0.45:
        background.second = _near(rng, first, 40)
        angle = rng.uniform(0, 2 * math.pi)
        background.direction = (math.cos(angle), math.sin(angle))
    if rng.random() < 0.3:
        background.pattern = rng.choice(("rows", "columns", "checks", "diagonals"))
        background.period = rng.randint(3, 20)
        background.depth = rng.choice((-1, 1)) * rng.randint(5, 18)
    if rng.random() < 0.5:
        background.noise = rng.randint(2, 14)
        background.noise_over_all = rng.random() < 0.4
        background.noise_origin = (rng.randrange(512), rng.randrange(512))
    return background


def _distance(a: RGB, b: RGB) -> float:
    return math.dist(a, b)


def _stands_out(rgb: RGB, background: Background) -> bool:
    ends = [background.first, tuple(level + background.depth for level in background.first)]
    if background.second is not None:
        ends.append(background.second)
    margin = CONTRAST + abs(background.depth) + background.noise
    return all(_distance(rgb, end) >= margin for end in ends)


def _palette(rng: Random, background: Background) -> list[tuple[str, RGB]]:
    """Two to four, now and then all, colours that stand out from the background; a name keeps its variant."""
    names = list(COLOURS)
    rng.shuffle(names)
    wanted = rng.choice((1, 2, 2, 3, 3, 4, 5, len(names)))
    plain = rng.random() < 0.4  # exactly the CSS colours
    palette = []
    for name in names:
        variants, jitter = COLOURS[name]
        rgb = variants[0] if plain else _near(rng, rng.choice(variants), rng.choice((0, jitter // 2, jitter)))
        if _stands_out(rgb, background):
            palette.append((name, rgb))
            if len(palette) == wanted:
                break
    return palette


def _sizes(rng: Random, width: int, height: int, number: int) -> list[float]:
    """Longest sides: small and large ones, as size questions want them, or any size that the picture has room for."""
    side = min(width, height)
    if side < 56 or rng.random() < (0.3 if width * height > 40000 else 0.65):
        return [
            rng.uniform(17, SMALL) if rng.random() < 0.5 else rng.uniform(LARGE, min(37, side - 5))
            for _ in range(number)
        ]
    most = 0.85 * min(side, 1.3 * math.sqrt(width * height / max(1, number)))
    most = max(30.0, min(most, 170.0))
    if rng.random() < 0.3:  # all alike
        common = math.exp(rng.uniform(math.log(17), math.log(most)))
        return [common * rng.uniform(0.9, 1.1) for _ in range(number)]
    return [math.exp(rng.uniform(math.log(17), math.log(most))) for _ in range(number)]


@lru_cache(maxsize=64)
def _regular(points: int) -> np.ndarray:
    angles = np.arange(points) * (2 * math.pi / points) - math.pi / 2
    return np.stack([np.cos(angles), np.sin(angles)], 1)


def _unit_polygon(rng: Random, shape: str) -> np.ndarray:
    """Corners of the shape in its own coordinates; the scale is free."""
    if shape in ("circle", "ellipse"):
        return _regular(48)
    if shape in ("square", "rectangle"):
        return np.array([(-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    if shape == "triangle":
        apex = 0.0 if rng.random() < 0.75 else rng.uniform(-1, 1)
        return np.array([(apex, -1.0), (1.0, 1.0), (-1.0, 1.0)])
    if shape == "star":
        points = 5 if rng.random() < 0.85 else rng.choice((4, 6))
        polygon = _regular(2 * points).copy()
        polygon[1::2] *= rng.uniform(0.36, 0.5)
        return polygon
    arm = rng.uniform(0.26, 0.42)
    return np.array([
        (-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm),
        (arm, 1), (-arm, 1), (-arm, arm), (-1, arm), (-1, -arm), (-arm, -arm),
    ])  # fmt: skip


def _make_thing(
    rng: Random, shape: str, colour: tuple[str, RGB], size: float, style: str, upright: bool, background: Background
) -> Thing:
    polygon = _unit_polygon(rng, shape)
    polygon = polygon / (np.ptp(polygon, axis=0) / 2)
    if shape in ("ellipse", "rectangle"):
        # the short side stays at least 11 pixels, as far as the shape allows
        ratio = 1 / rng.uniform(1.5, max(1.5, min(3.0, size / 11)))
        squeeze = (1.0, ratio) if rng.random() < 0.6 else (ratio, 1.0)
    else:
        ratio = rng.uniform(0.94, 1.0) if shape in ("circle", "square") else rng.uniform(0.8, 1.0)
        ratio = 1.0 if rng.random() < 0.5 else ratio
        squeeze = (1.0, ratio) if rng.random() < 0.5 else (ratio, 1.0)
    if style == "mixed":
        style = rng.choice(("fill", "lined", "hollow"))
    line, line_rgb = 0.0, colour[1]
    if style == "hollow":
        line = max(2.5, rng.uniform(0.1, 0.16) * size)
        if size < 27:
            style, line = "fill", 0.0
    elif style == "lined":
        line = rng.uniform(1, 1.5 if size < 30 else max(1.5, 0.05 * size))
        line_rgb = rng.choice(((0, 0, 0), (255, 255, 255), (60, 60, 60)))
        if _distance(line_rgb, colour[1]) < 60:
            style, line = "fill", 0.0
    polygon = polygon * (np.array(squeeze) * ((size - line) / 2))
    turn = 0.0
    if not upright:
        turn = rng.uniform(-math.pi, math.pi) if shape in ("triangle", "star") else math.radians(rng.uniform(-18, 18))
    elif shape == "triangle" and rng.random() < 0.15:
        turn = math.pi
    if turn and shape != "circle":
        c, s = math.cos(turn), math.sin(turn)
        polygon = polygon @ np.array([(c, s), (-s, c)])
    low, high = polygon.min(0), polygon.max(0)
    polygon = polygon - (low + high) / 2
    half = (high - low) / 2 + line / 2
    return Thing(shape, colour[0], colour[1], size, polygon, float(half[0]), float(half[1]), style, line, line_rgb)


def _place(rng: Random, things: list[Thing], width: int, height: int) -> list[Thing]:
    """Give every thing a centre where it touches nothing; those that find no place are left out."""
    layout = rng.random()
    placed: list[Thing] = []
    slots: list[tuple[float, float]] = []
    if layout < 0.45:  # a jittered grid with about twice as many cells as things
        cell = max(24.0, math.sqrt(width * height / (2.2 * max(1, len(things)))))
        columns, rows = max(1, round(width / cell)), max(1, round(height / cell))
        slots = [((i + 0.5) * width / columns, (j + 0.5) * height / rows) for i in range(columns) for j in range(rows)]
        rng.shuffle(slots)
    elif layout < 0.6:  # a row or a column
        n = max(1, len(things))
        along = [(i + 0.5) / n for i in range(n)]
        across = rng.uniform(0.35, 0.65)
        across_x = width >= height
        slots = [(a * width, across * height) if across_x else (across * width, a * height) for a in along]
    jitter = rng.choice((0.0, 2.0, 6.0))
    for thing in things:
        left, right = thing.half_width + GAP / 2, width - thing.half_width - GAP / 2
        top, bottom = thing.half_height + GAP / 2, height - thing.half_height - GAP / 2
        if left > right or top > bottom:
            continue
        for attempt in range(14):
            if slots and attempt < 4:
                x, y = slots.pop()
                x = min(right, max(left, x + rng.uniform(-jitter, jitter)))
                y = min(bottom, max(top, y + rng.uniform(-jitter, jitter)))
            else:
                x, y = rng.uniform(left, right), rng.uniform(top, bottom)
            if all(
                abs(x - other.x) > thing.half_width + other.half_width + GAP
                or abs(y - other.y) > thing.half_height + other.half_height + GAP
                for other in placed
            ):
                thing.x, thing.y = x, y
                placed.append(thing)
                break
    return placed


# Drawing


@lru_cache(maxsize=1)
def _noise_bank() -> np.ndarray:
    """1024 x 1024 pixels of unit noise in 1/16 levels; a picture takes a window of it, which is 20 times faster."""
    return np.clip(np.random.default_rng(0).normal(0, 16, (1024, 1024, 3)), -127, 127).astype(np.int8)


def _add_noise(levels: np.ndarray, background: Background) -> np.ndarray:
    y, x = background.noise_origin
    noise = _noise_bank()[y : y + levels.shape[0], x : x + levels.shape[1]].astype(np.int16)
    return np.clip(levels + ((noise * background.noise) >> 4), 0, 255).astype(np.uint8)


def _paint(background: Background, width: int, height: int) -> np.ndarray:
    """[height, width, 3] levels of the background, noise excluded."""
    levels = np.empty((height, width, 3), np.int16)
    levels[:] = background.first
    columns, rows = np.arange(width), np.arange(height)[:, None]
    if background.second is not None:
        dx, dy = background.direction
        t = columns * np.float32(dx / width) + rows * np.float32(dy / height)
        t = (t - t.min()) / max(float(np.ptp(t)), 1e-6)
        change = np.array(background.second, np.float32) - np.array(background.first, np.float32)
        levels += (t[..., None] * change).astype(np.int16)
    if background.pattern is not None:
        period = background.period
        bands = {
            "rows": rows // period + 0 * columns,
            "columns": columns // period + 0 * rows,
            "checks": rows // period + columns // period,
            "diagonals": (rows + columns) // period,
        }[background.pattern]
        levels += ((bands & 1) * background.depth).astype(np.int16)[..., None]
    return np.clip(levels, 0, 255).astype(np.uint8)


def _stamp(image: Image.Image, thing: Thing, line: float, rgb: RGB, scale: int) -> None:
    """Paste one colour through a mask: the filled polygon, or if `line` its contour, drawn `scale` times larger."""
    x0, y0 = math.floor(thing.x - thing.half_width) - 1, math.floor(thing.y - thing.half_height) - 1
    x1, y1 = math.ceil(thing.x + thing.half_width) + 1, math.ceil(thing.y + thing.half_height) + 1
    mask = Image.new("L", ((x1 - x0) * scale, (y1 - y0) * scale))
    # Pillow's coordinates name pixel centres
    corners = [((x + thing.x - x0) * scale - 0.5, (y + thing.y - y0) * scale - 0.5) for x, y in thing.polygon.tolist()]
    pen = ImageDraw.Draw(mask)
    if line:
        width = max(1, round(line * scale))
        pen.line([*corners, corners[0], corners[1]], fill=255, width=width, joint="curve")
    else:
        pen.polygon(corners, fill=255)
    if scale > 1:
        mask = mask.reduce(scale)
    image.paste(rgb, (x0, y0), mask)


def draw(scene: Scene) -> np.ndarray:
    """[height, width, 3] uint8 levels."""
    background = scene.background
    plain = background.second is None and background.pattern is None
    if plain and not background.noise:
        image = Image.new("RGB", (scene.width, scene.height), background.first)
    else:
        levels = _paint(background, scene.width, scene.height)
        if background.noise and not background.noise_over_all:
            levels = _add_noise(levels, background)
        image = Image.fromarray(levels)
    for thing in scene.things:
        scale = 1 if not scene.smooth else 4 if thing.size < 60 else 2
        if thing.style != "hollow":
            _stamp(image, thing, 0.0, thing.rgb, scale)
        if thing.line:
            _stamp(image, thing, thing.line, thing.line_rgb, scale)
    levels = np.asarray(image)
    if background.noise and background.noise_over_all:
        levels = _add_noise(levels, background)
    return levels
