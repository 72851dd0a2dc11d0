"""The pictures of the breadth set, drawn by hand: every coordinate below was chosen by a person, nothing is random.

    python tests/breadth/draw.py        writes tests/breadth/pictures/ again

This file shares no code with the generator that nano is trained on, and must not: it is there to notice what that
generator forgot. Each object is noted in `Sheet.things`, so that a test can check that the scene is a fair one.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent / "pictures"
SHEETS: dict[str, "Sheet"] = {}


@dataclass
class Thing:
    """shape and colour: the words of the answer. box: left, top, right, bottom in pixels."""

    shape: str
    colour: str
    box: tuple[float, float, float, float]

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2

    @property
    def longest(self) -> float:
        return max(self.box[2] - self.box[0], self.box[3] - self.box[1])


@dataclass
class Sheet:
    """A picture in the making. Lengths are pixels, angles degrees clockwise.

    background: a colour or a picture of this size. fine: objects are drawn that many times larger and averaged, which
    smooths their edges; 1 leaves steps. mode: of the file, as Pillow names it; RGBA leaves the background out.
    A colour is a word, or a word and the paint to use for it: "red", "red #d62728".
    `hollow` draws only a line of that width, `rim` a thin line of another colour around the filled shape.
    """

    name: str
    width: int
    height: int
    background: str | Image.Image = "white"
    fine: int = 4
    mode: str = "RGB"
    things: list[Thing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layer = Image.new("RGBA", (self.width * self.fine, self.height * self.fine))
        self.pen = ImageDraw.Draw(self.layer)
        SHEETS[self.name] = self

    def polygon(self, shape: str, colour: str, points, hollow: int = 0, rim: str = "") -> None:
        word, _, paint = colour.partition(" ")
        xs, ys = zip(*points, strict=True)
        reach = hollow / 2
        self.things.append(Thing(shape, word, (min(xs) - reach, min(ys) - reach, max(xs) + reach, max(ys) + reach)))
        # Pillow speaks of pixel centres: a fine pixel's centre lies half of it further right and down
        scaled = [(x * self.fine - 0.5, y * self.fine - 0.5) for x, y in points]
        if not hollow:
            self.pen.polygon(scaled, fill=paint or word)
        if hollow or rim:
            line = rim or paint or word
            self.pen.line([*scaled, *scaled[:2]], fill=line, width=(hollow or 2) * self.fine, joint="curve")

    def circle(self, colour: str, x: float, y: float, radius: float, **style) -> None:
        self.polygon("circle", colour, oval(x, y, radius, radius), **style)

    def ellipse(self, colour: str, x: float, y: float, wide: float, high: float, turn: float = 0, **style) -> None:
        self.polygon("ellipse", colour, turned(oval(x, y, wide / 2, high / 2), x, y, turn), **style)

    def square(self, colour: str, x: float, y: float, side: float, turn: float = 0, **style) -> None:
        self.polygon("square", colour, turned(corners(x, y, side, side), x, y, turn), **style)

    def rectangle(self, colour: str, x: float, y: float, wide: float, high: float, turn: float = 0, **style) -> None:
        self.polygon("rectangle", colour, turned(corners(x, y, wide, high), x, y, turn), **style)

    def triangle(self, colour: str, a, b, c, **style) -> None:
        self.polygon("triangle", colour, [a, b, c], **style)

    def star(
        self, colour: str, x: float, y: float, radius: float, turn: float = 0, waist: float = 0.42, **style
    ) -> None:
        spokes = [(radius * (waist if i % 2 else 1), math.radians(turn + 36 * i)) for i in range(10)]
        self.polygon("star", colour, [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in spokes], **style)

    def cross(self, colour: str, x: float, y: float, arm: float, thick: float, turn: float = 0, **style) -> None:
        t = thick / 2
        quarter = [(-t, -arm), (t, -arm), (t, -t)]
        points = (
            quarter + [(-v, u) for u, v in quarter] + [(-u, -v) for u, v in quarter] + [(v, -u) for u, v in quarter]
        )
        self.polygon("cross", colour, turned([(x + u, y + v) for u, v in points], x, y, turn), **style)

    def picture(self) -> Image.Image:
        size = self.width, self.height
        objects = self.layer.resize(size, Image.Resampling.BOX)
        if self.mode == "RGBA":
            return objects
        ground = self.background
        ground = Image.new("RGB", size, ground) if isinstance(ground, str) else ground.copy()
        ground.paste(objects, mask=objects)
        if self.mode == "P":
            return ground.quantize(32)
        return ground.convert(self.mode)


def oval(x: float, y: float, half_width: float, half_height: float):
    angles = [math.radians(3 * i) for i in range(120)]
    return [(x + half_width * math.cos(a), y + half_height * math.sin(a)) for a in angles]


def corners(x: float, y: float, wide: float, high: float):
    w, h = wide / 2, high / 2
    return [(x - w, y - h), (x + w, y - h), (x + w, y + h), (x - w, y + h)]


def turned(points, x: float, y: float, degrees: float):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return [(x + c * (u - x) - s * (v - y), y + s * (u - x) + c * (v - y)) for u, v in points]


# --- Backgrounds ---------------------------------------------------------------------------------------------------


def shade(width: int, height: int, start: tuple, end: tuple, where) -> Image.Image:
    """where(x, y) in 0..1 is the way from one colour to the other."""
    ground = Image.new("RGB", (width, height))
    for y in range(height):
        for x in range(width):
            t = where(x, y)
            ground.putpixel((x, y), tuple(round(a + t * (b - a)) for a, b in zip(start, end, strict=True)))
    return ground


def down(width, height, start, end):
    return shade(width, height, start, end, lambda x, y: y / (height - 1))


def across(width, height, start, end):
    return shade(width, height, start, end, lambda x, y: x / (width - 1))


def glow(width, height, middle, edge):
    far = math.hypot(width, height) / 2
    return shade(width, height, middle, edge, lambda x, y: math.hypot(x - width / 2, y - height / 2) / far)


def stripes(width, height, one, two, step, slope=(1, 0)):
    return shade(width, height, one, two, lambda x, y: (x * slope[0] + y * slope[1]) // step % 2)


def checks(width, height, one, two, step):
    return shade(width, height, one, two, lambda x, y: (x // step + y // step) % 2)


def spots(width, height, ground, dot, step):
    """Rows of dots three pixels wide."""
    return shade(width, height, ground, dot, lambda x, y: max(x % step, y % step) < 3)


def grain(width, height, dark, light):
    """Looks like noise: a hash of the pixel's place."""
    return shade(width, height, dark, light, lambda x, y: (x * 7919 ^ y * 104729 ^ x * y * 31) % 5 / 4)


# --- One object ----------------------------------------------------------------------------------------------------

s = Sheet("dot.png", 40, 40, fine=1)
s.circle("red", 20, 20, 13)

s = Sheet("night_star.png", 40, 40, "black")
s.star("yellow", 20, 21, 18)

s = Sheet("plus.png", 80, 80)
s.cross("purple", 40, 40, 24, 14)

s = Sheet("egg.png", 50, 50, "#dddddd")
s.ellipse("blue", 25, 25, 19, 36)

s = Sheet("plank.png", 45, 45, fine=1)
s.rectangle("brown saddlebrown", 22.5, 22.5, 36, 17)

s = Sheet("harbour.png", 64, 64, "#000080")
s.cross("white", 32, 32, 20, 12)

s = Sheet("one_bit.png", 64, 64, fine=1, mode="1")
s.triangle("black", (32, 12), (54, 50), (10, 50))

s = Sheet("corner_star.png", 300, 300, "#fafad2")
s.star("purple darkviolet", 238, 68, 52)

s = Sheet("flag.png", 96, 96, "#2050b0")
s.star("yellow gold", 48, 50, 26, turn=10)

s = Sheet("leaf.png", 80, 80, fine=1, mode="P")
s.cross("green forestgreen", 40, 40, 22, 15)

s = Sheet("lonely.png", 160, 90, down(160, 90, (20, 20, 30), (60, 60, 80)))
s.square("orange", 132, 68, 24)

s = Sheet("pebble.png", 100, 100, grain(100, 100, (225, 225, 220), (250, 250, 245)))
s.circle("grey dimgrey", 20, 50, 10)

s = Sheet("blank.png", 120, 120, "lightgrey")

s = Sheet("blank_sky.png", 200, 80, across(200, 80, (200, 225, 255), (255, 255, 255)))

# --- Two objects ---------------------------------------------------------------------------------------------------

s = Sheet("pair.png", 60, 40, "#ffffe0", fine=1)
s.square("blue", 16, 20, 18)
s.triangle("green", (35, 30), (44, 11), (53, 30))

s = Sheet("navy.png", 120, 80, "#101830")
s.circle("white", 22, 18, 12)
s.ellipse("orange darkorange", 88, 58, 44, 22)

s = Sheet("sky.png", 100, 100, down(100, 100, (135, 206, 250), (255, 255, 255)))
s.triangle("red", (50, 8), (66, 36), (34, 36))
s.square("pink hotpink", 50, 76, 30)

s = Sheet("beige.png", 200, 120, stripes(200, 120, (245, 235, 215), (235, 223, 200), 8))
s.ellipse("brown sienna", 50, 60, 30, 60)
s.triangle("purple", (140, 34), (168, 88), (112, 88))

s = Sheet("tilted.png", 90, 60, "#d8f0d8")
s.square("orange", 24, 30, 22, turn=12)
s.circle("black", 64, 30, 12)

s = Sheet("big_and_little.png", 400, 300)
s.circle("blue royalblue", 110, 150, 70)
s.circle("red", 310, 90, 10)

s = Sheet("rings.png", 120, 120)
s.circle("red", 33, 60, 19, hollow=6)
s.square("blue", 87, 60, 36, hollow=6)

s = Sheet("inked.png", 160, 100)
s.star("yellow", 40, 52, 27, rim="black")
s.ellipse("green limegreen", 112, 50, 56, 32, rim="black")

s = Sheet("ash.png", 100, 80)
s.circle("grey", 27, 40, 17)
s.triangle("black", (72, 20), (91, 58), (53, 58))

s = Sheet("board.png", 160, 160, checks(160, 160, (242, 242, 242), (228, 228, 228), 10))
s.cross("red firebrick", 38, 124, 20, 13)
s.circle("blue", 124, 36, 20)

s = Sheet("snow.png", 180, 120, grain(180, 120, (50, 60, 80), (80, 92, 112)))
s.triangle("yellow", (45, 36), (72, 84), (18, 84))
s.square("white", 134, 60, 36)

s = Sheet("coupon.png", 120, 90, "#eef6ff", mode="P")
s.rectangle("green", 34, 28, 48, 24)
s.star("red #d62728", 88, 60, 22)

s = Sheet("sticker.png", 120, 80, mode="RGBA")
s.square("blue mediumblue", 34, 40, 32)
s.circle("red", 88, 40, 17)

s = Sheet("leaning.png", 140, 90, "#e8f4ff")
s.square("red crimson", 36, 45, 32, turn=15)
s.rectangle("green", 98, 45, 52, 24, turn=-10)

s = Sheet("pitch.png", 120, 120, "#1f4a1f")
s.circle("white snow", 26, 26, 14)
s.square("orange", 94, 94, 28)

s = Sheet("candy.png", 100, 60, "#222222")
s.circle("pink", 28, 30, 16)
s.star("pink hotpink", 72, 31, 20, turn=18)

s = Sheet("chimney.png", 80, 400, "#f4f4f4")
s.triangle("blue", (40, 24), (68, 76), (12, 76))
s.cross("orange darkorange", 40, 344, 26, 16)

s = Sheet("sides.png", 180, 180)
s.circle("blue #1f77b4", 30, 90, 18)
s.star("red", 150, 92, 24)

s = Sheet("mist.png", 240, 240, glow(240, 240, (255, 255, 255), (190, 230, 190)))
s.square("red", 36, 204, 18)
s.square("blue", 160, 84, 64)

s = Sheet("bean.png", 150, 150, "#ffeedd")
s.ellipse("green", 118, 120, 22, 13)
s.circle("purple", 56, 60, 34)

s = Sheet("snapshot.jpg", 200, 150, "#f8f8f8")
s.square("green #2ca02c", 52, 78, 48)
s.triangle("blue", (145, 45), (178, 108), (112, 108))

s = Sheet("lilac.png", 110, 70, "lavender")
s.cross("green", 28, 35, 18, 11, turn=20)
s.ellipse("orange", 78, 35, 46, 25, turn=15)

s = Sheet("lamp_post.png", 70, 50, "#111111", fine=1)
s.square("red", 18, 25, 20)
s.circle("yellow", 52, 25, 11)

s = Sheet("cellar.png", 256, 256, checks(256, 256, (30, 32, 36), (42, 44, 48), 16))
s.circle("white", 66, 190, 30)
s.cross("yellow", 196, 70, 34, 20)

s = Sheet("tower.png", 90, 180, stripes(90, 180, (255, 250, 240), (246, 238, 222), 6, (0, 1)))
s.rectangle("black", 45, 118, 30, 80)
s.circle("red", 45, 36, 17)

# --- Three and more ------------------------------------------------------------------------------------------------

s = Sheet("five.png", 160, 120, fine=1)
s.circle("red", 25, 30, 14)
s.circle("red", 80, 26, 14)
s.circle("blue", 132, 34, 15)
s.star("green", 44, 90, 20)
s.square("green", 108, 90, 28)

s = Sheet("charcoal.png", 200, 150, "#303030")
s.rectangle("yellow", 40, 70, 26, 64)
s.star("white", 130, 34, 20)
s.cross("red", 152, 114, 20, 13)

s = Sheet("tall.png", 60, 240)
s.star("red", 30, 36, 18)
s.circle("green", 30, 120, 16)
s.rectangle("blue", 30, 198, 42, 20)

s = Sheet("banner.png", 300, 60, "#eeeeee")
s.square("black", 30, 30, 26)
s.star("orange", 110, 32, 21)
s.triangle("pink hotpink", (190, 12), (210, 48), (170, 48))
s.circle("purple", 268, 30, 17)

s = Sheet("dusk.png", 360, 240, across(360, 240, (15, 15, 60), (60, 20, 70)))
s.cross("white", 60, 56, 28, 18)
s.circle("yellow", 180, 120, 34)
s.triangle("orange", (306, 160), (342, 220), (270, 220))

s = Sheet("six.png", 240, 160)
s.square("red", 28, 44, 30)
s.star("blue", 64, 116, 22)
s.triangle("green", (106, 24), (126, 60), (86, 60))
s.circle("orange", 142, 118, 17)
s.cross("black", 176, 46, 18, 12)
s.ellipse("purple", 212, 112, 26, 46)

s = Sheet("night_sky.png", 200, 200, "#202040")
s.star("yellow", 36, 40, 20)
s.star("yellow", 104, 30, 16, turn=20)
s.star("yellow", 164, 66, 22, turn=8)
s.star("yellow", 48, 150, 18, turn=30)
s.star("white", 130, 150, 26)

s = Sheet("confetti.png", 200, 140, spots(200, 140, (255, 238, 242), (248, 222, 230), 12))
s.star("black", 100, 34, 22)
s.circle("blue", 40, 100, 18)
s.rectangle("red", 156, 100, 52, 24, turn=-15)

s = Sheet("decal.png", 160, 120, mode="RGBA")
s.star("orange #ff8000", 36, 62, 26)
s.triangle("purple", (88, 36), (110, 80), (66, 80))
s.circle("black", 136, 60, 16)

s = Sheet("peaks.png", 200, 200)
s.triangle("red", (44, 20), (72, 70), (16, 70))
s.triangle("blue", (150, 18), (182, 72), (118, 72))
s.triangle("blue", (52, 118), (86, 176), (18, 176))
s.circle("black", 146, 148, 24)

s = Sheet("shore.png", 320, 200, shade(320, 200, (250, 235, 200), (200, 230, 250), lambda x, y: (x + y) / 518))
s.ellipse("blue", 66, 150, 90, 42)
s.ellipse("red", 170, 70, 36, 84)
s.circle("green seagreen", 262, 124, 32)

s = Sheet("traffic.png", 400, 80, "#404040")
s.circle("red", 50, 40, 22)
s.circle("white", 200, 40, 22)
s.square("yellow", 350, 40, 40)

s = Sheet("compass.png", 120, 120, fine=1)
s.square("black", 60, 22, 26)
s.circle("red", 22, 60, 13)
s.circle("green", 98, 60, 13)
s.square("blue", 60, 98, 26)

s = Sheet("cinema.png", 220, 140, stripes(220, 140, (43, 43, 43), (55, 55, 55), 7, (0, 1)))
s.star("green lime", 46, 72, 26)
s.rectangle("pink hotpink", 150, 34, 76, 30)
s.triangle("white", (150, 78), (182, 128), (118, 128))

s = Sheet("citrus.png", 128, 96)
s.circle("orange", 24, 30, 16)
s.square("orange darkorange", 66, 68, 26)
s.triangle("orange", (104, 14), (122, 46), (86, 46))

s = Sheet("doors.png", 200, 130, "#e0e0e0")
s.rectangle("black", 36, 62, 28, 70)
s.rectangle("black", 110, 34, 64, 26)
s.rectangle("red", 152, 92, 62, 28)

s = Sheet("market.png", 400, 266, grain(400, 266, (232, 240, 232), (250, 255, 250)), mode="P")
s.star("red", 60, 60, 34)
s.circle("red", 176, 64, 28)
s.circle("green", 312, 76, 40)
s.star("blue", 84, 194, 38, turn=12)
s.circle("green forestgreen", 208, 196, 30)
s.square("black", 336, 206, 54, turn=8)

s = Sheet("ribbon.png", 300, 200, stripes(300, 200, (250, 246, 255), (238, 230, 246), 10, (1, 1)))
s.rectangle("red", 48, 60, 60, 34)
s.cross("blue", 110, 140, 30, 18)
s.ellipse("green", 188, 64, 74, 40)
s.star("black", 250, 146, 34)

s = Sheet("marbles.png", 160, 100, "black", fine=1)
s.circle("blue dodgerblue", 28, 30, 15)
s.circle("blue dodgerblue", 80, 68, 15)
s.circle("blue dodgerblue", 130, 32, 15)

s = Sheet("toys.png", 280, 180, "#f0f0ff")
s.square("green", 50, 50, 52)
s.square("green", 60, 140, 20)
s.ellipse("yellow gold", 150, 90, 34, 80, rim="black")
s.cross("brown saddlebrown", 230, 52, 28, 16)
s.triangle("grey", (226, 108), (258, 164), (194, 164))

s = Sheet("zoo.png", 240, 120, "#fffaf0")
s.circle("pink deeppink", 40, 60, 26)
s.triangle("brown #8b4513", (116, 32), (144, 88), (88, 88))
s.rectangle("grey #777777", 196, 60, 30, 72)

s = Sheet("hollows.png", 240, 100, "#181818")
s.triangle("yellow", (42, 18), (76, 80), (8, 80), hollow=6)
s.star("white", 120, 52, 34, hollow=5)
s.rectangle("red", 200, 50, 60, 36, hollow=6)

# --- For conversations about two pictures --------------------------------------------------------------------------

s = Sheet("first_star.png", 80, 80)
s.star("red", 40, 42, 26)

s = Sheet("second_star.png", 80, 80)
s.star("blue", 40, 42, 26)

s = Sheet("three_peas.png", 120, 80, "#f6fff6")
s.circle("green", 24, 40, 14)
s.circle("green", 60, 40, 14)
s.circle("green", 96, 40, 14)

s = Sheet("dice.png", 120, 80, "black")
s.square("white", 28, 40, 26)
s.circle("green limegreen", 62, 26, 14)
s.square("white", 96, 48, 26)

s = Sheet("moved_before.png", 100, 100, "#333366")
s.square("yellow", 18, 18, 22)

s = Sheet("moved_after.png", 100, 100, "#333366")
s.square("yellow", 82, 82, 22)

s = Sheet("crumb.png", 60, 60)
s.circle("black", 30, 30, 9)

s = Sheet("wheel.png", 200, 160)
s.circle("black", 100, 80, 44)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for sheet in SHEETS.values():
        options = {"quality": 88} if sheet.name.endswith(".jpg") else {"optimize": True}
        sheet.picture().save(FOLDER / sheet.name, **options)
    print(f"{len(SHEETS)} pictures, {sum(f.stat().st_size for f in FOLDER.iterdir()):,} bytes")
