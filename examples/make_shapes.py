"""Draw examples/shapes.png, the picture of `make run`: plain Pillow, not the generator that nano learned from."""

from pathlib import Path

from PIL import Image, ImageDraw

SCALE = 4  # drawn large, then averaged down: smooth edges
picture = Image.new("RGB", (160 * SCALE, 120 * SCALE), "#f6f3ec")
draw = ImageDraw.Draw(picture)
draw.ellipse([n * SCALE for n in (22, 20, 54, 52)], fill="#d92b2b")
draw.rectangle([n * SCALE for n in (102, 66, 130, 94)], fill="#2456d6")
draw.polygon([n * SCALE for n in (46, 72, 28, 102, 64, 102)], fill="#2c9a45")
picture.reduce(SCALE).save(Path(__file__).with_name("shapes.png"))
