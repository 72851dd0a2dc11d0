"""Draw figures/decoder_layer.svg and .png: what flows through one layer, in which precision, rounded where.

Follows `model.DecoderLayer`, `attention.Attention` and `moe.experts` of a bfloat16 model, operation by operation.
"""

from drawing import FULL, INK, PLAIN, Page, save
from matplotlib.patches import Rectangle, RegularPolygon

from inkling_ref.notebook import COLOURS

C = COLOURS
NARROW, WIDE = 1.3, 3.4  # line widths: bfloat16, float32
page = Page(11.0, 11.85)


def rounding(x, y) -> None:
    page.axes.add_patch(RegularPolygon((x, y), 4, radius=0.085, facecolor=INK, edgecolor="white", lw=0.8, zorder=6))


def kept(x, y) -> None:
    """Mark of what the cache keeps."""
    page.axes.add_patch(
        Rectangle((x - 0.065, y - 0.065), 0.13, 0.13, facecolor="white", edgecolor=INK, lw=1.6, zorder=6)
    )


def product(x, y, width, text, colour=PLAIN, size=9.6) -> None:
    """A product of bfloat16 operands: the sums inside are float32, the result is rounded."""
    page.box(x, y, width, 0.36, text, colour, 0.14, size)


def float32(x, y, width, text, colour=PLAIN, height=0.36, size=9.6) -> None:
    page.box(x, y, width, height, text, colour, 0.3, size, edge=2.4)


def up(x, start, stop, wide=False, rounds=False, cached=False) -> None:
    page.arrow((x, start), (x, stop), width=2.4 if wide else NARROW)
    if rounds:
        rounding(x, start)
    if cached:
        kept(x, start + 0.19)


def shape(x, y, text) -> None:
    page.label(x, y, text, size=8.2, colour="#5c636b", align="left")


def legend() -> None:
    page.panel(0.15, 10.65, 10.7, 1.05, "")
    y, second = 11.38, 10.97
    page.line((0.4, y), (1.0, y), width=NARROW)
    page.label(1.12, y, "bfloat16", align="left")
    page.line((0.4, second), (1.0, second), width=WIDE)
    page.label(1.12, second, "float32", align="left")
    page.box(2.45, y - 0.14, 0.6, 0.28, strength=0.14)
    page.label(3.17, y, "product of bfloat16 tensors: sums inside are float32", align="left")
    float32(2.45, second - 0.14, 0.6, "", height=0.28)
    page.label(3.17, second, "computed in float32, whatever comes in", align="left")
    rounding(7.62, y)
    page.label(7.8, y, "rounds to bfloat16", align="left")
    kept(7.62, second)
    page.label(7.8, second, "a cache keeps it for later tokens", align="left")


def attention_half() -> None:
    page.panel(0.15, 0.15, 7.0, 10.35, "Attention", FULL)
    rail, left, column, gap = 0.55, 1.0, 0.9, 0.12
    names = ("r", "q", "k", "sink", "v", "gate")
    x = {name: left + i * (column + gap) for i, name in enumerate(names)}
    mid = {name: x[name] + column / 2 for name in names}
    width, middle = 6 * column + 5 * gap, left + 3 * column + 2.5 * gap
    to = {name: x[name] + column - left for name in names}  # width of a box from the first column to this one

    page.arrow((rail, 0.3), (rail, 9.5), width=NARROW)
    page.label(left, 0.42, "depth state: the running sum, and the sums of completed blocks", 9.3, C["residual"], "left")
    mixture = "mix over depth: softmax over the sources' RMS · query; full layers: once each for q, k, v"
    float32(left, 0.65, width, mixture, C["residual"], size=9.3)
    page.arrow((rail, 0.83), (left, 0.83), colour=C["residual"])
    page.dot(rail, 0.83, C["residual"])
    up(middle, 1.01, 1.23, wide=True)
    float32(left, 1.23, width, "RMSNorm (full layers: three)")
    page.line((middle, 1.59), (middle, 1.83))
    rounding(middle, 1.59)
    shape(middle + 0.14, 1.72, "x [B, T, D]")
    page.line((mid["r"], 1.83), (mid["gate"], 1.83))

    matrices = {"r": "$W_r$", "q": "$W_q$", "k": "$W_k$", "sink": "$W_z$", "v": "$W_v$", "gate": r"$W_\gamma$"}
    colours = {"r": C["bias"], "q": C["query"], "k": C["key"], "sink": C["sink"], "v": C["value"], "gate": C["gate"]}
    for name, text in matrices.items():
        up(mid[name], 1.83, 2.02)
        product(x[name], 2.02, column, text, colours[name], 11)
    for name in "kv":
        up(mid[name], 2.38, 2.83, rounds=True, cached=True)
        float32(x[name], 2.83, column, "short\nconv", C["conv"], 0.5)
        up(mid[name], 3.33, 3.59, rounds=True)
        float32(x[name], 3.59, column, "L2 clip" if name == "k" else "RMS", colours[name])
    for name in "rq":
        up(mid[name], 2.38, 2.83, rounds=True)
        float32(x[name], 2.83, column, "× scale,\nL2 clip", colours[name], 0.5)
        up(mid[name], 3.33, 3.59, rounds=True)
        float32(x[name], 3.59, column, "log scaling*", colours[name], size=8.8)
        up(mid[name], 3.95, 4.44, rounds=True)
    up(mid["k"], 3.95, 4.44, rounds=True, cached=True)
    shape(mid["r"] + 0.13, 4.2, "[B, T, H, R]")
    shape(mid["q"] + 0.13, 4.2, "[B, T, H, d]")
    shape(mid["k"] + 0.13, 4.2, "[B, S, G, d]")

    product(x["r"], 4.44, column, "r P[t - s]", C["bias"])
    product(x["q"], 4.44, 2 * column + gap, "q · k")
    up(mid["q"] + 0.5, 4.8, 5.06, rounds=True)
    product(x["q"], 5.06, 2 * column + gap, r"× 1 / $\sqrt{d}$")
    up(mid["r"], 4.8, 5.68, rounds=True)
    up(mid["q"] + 0.5, 5.42, 5.68, rounds=True)
    product(left, 5.68, to["k"], "+, and what is hidden becomes -∞", FULL)
    up(left + to["k"] / 2, 6.04, 6.3, rounds=True)
    shape(left + to["k"] / 2 + 0.14, 6.16, "[B, H, T, S]")
    up(mid["sink"], 2.38, 6.3, rounds=True)
    float32(left, 6.3, to["sink"], "softmax over keys and sink, without the sink's share", FULL)
    up(left + to["sink"] / 2, 6.66, 6.92, rounds=True)
    up(mid["v"], 3.95, 6.92, rounds=True, cached=True)
    shape(mid["v"] + 0.13, 4.2, "[B, S, G, d]")
    product(left, 6.92, to["v"], "p · v", FULL)
    up(left + to["v"] / 2, 7.28, 7.54, rounds=True)
    shape(left + to["v"] / 2 + 0.14, 7.4, "[B, T, H d]")
    up(mid["gate"], 2.38, 7.54, rounds=True)
    float32(left, 7.54, width, "× sigmoid(gate)", C["gate"])
    up(middle, 7.9, 8.16, rounds=True)
    product(left, 8.16, width, "$W_o$", FULL, 11)
    up(middle, 8.52, 8.88, rounds=True, cached=True)
    shape(middle + 0.14, 8.71, "y [B, T, D]")
    float32(left, 8.88, width, "short conv", C["conv"])
    page.arrow((middle, 9.24), (middle, 9.61), (rail + 0.11, 9.61))
    rounding(middle, 9.24)
    page.plus(rail, 9.61)
    anew = "first layer of a block: the old sum becomes\na completed one, and the new sum starts with y"
    page.label(middle + 0.12, 9.55, anew, 8.8, C["residual"], "left")
    # On to the experts, as float32.
    between, next_rail = 7.225, 7.7
    page.arrow(
        (rail, 9.72), (rail, 9.95), (between, 9.95), (between, 2.85), (next_rail, 2.85), (next_rail, 9.5), width=WIDE
    )


def experts_half() -> None:
    page.panel(7.3, 2.55, 3.55, 7.95, "Experts", C["moe"])
    rail, left, width, half = 7.7, 8.1, 2.6, 1.24
    middle, right = left + width / 2, left + width - half
    first, second = left + half / 2, right + half / 2

    float32(left, 3.2, width, "mix over depth", C["residual"])
    page.arrow((rail, 3.38), (left, 3.38), colour=C["residual"], width=2.4)
    page.dot(rail, 3.38, C["residual"])
    up(middle, 3.56, 3.86, wide=True)
    float32(left, 3.86, width, "RMSNorm")
    page.line((middle, 4.22), (middle, 4.55))
    rounding(middle, 4.22)
    shape(middle + 0.14, 4.37, "h [B, T, D]")
    page.line((first, 4.55), (second, 4.55))

    up(first, 4.55, 4.8)
    float32(left, 4.8, half, "router:\nsigmoid of a\nproduct, the\nk largest of\nscore + bias", C["moe"], 1.5, 9.3)
    up(second, 4.55, 4.8)
    product(right, 4.8, half, "$W_{13}$", C["moe"], 11)
    up(second, 5.16, 5.94, rounds=True)
    shape(second + 0.1, 5.5, "[k, 2I]")
    float32(right, 5.94, half, "capped\nSwiGLU", C["moe"], 0.5)
    up(second, 6.44, 6.94, rounds=True)
    shape(second + 0.1, 6.66, "[k, I]")
    product(right, 6.94, half, "$W_2$", C["moe"], 11)
    up(first, 6.3, 7.72, wide=True)
    page.label(first - 0.1, 6.9, "k\nweights", 8.2, "#5c636b", "right")
    up(second, 7.3, 7.72, rounds=True)
    shape(second + 0.1, 7.5, "[k, D]")
    float32(left, 7.72, width, "sum of weight × expert", C["moe"])
    up(middle, 8.08, 8.5, rounds=True, cached=True)
    shape(middle + 0.14, 8.27, "z [B, T, D]")
    float32(left, 8.5, width, "short conv", C["conv"])
    page.arrow((middle, 8.86), (middle, 9.61), (rail + 0.11, 9.61))
    rounding(middle, 8.86)
    page.plus(rail, 9.61)
    up(rail, 9.72, 10.3)
    rounding(rail, 9.84)
    page.label(rail + 0.18, 9.86, "rounded at the layer's end", 8.8, C["residual"], "left")


def notes() -> None:
    page.panel(7.3, 0.15, 3.55, 2.25, "")
    texts = (
        ("* in full layers only. These also mix three\ntimes, and their convolutions of k and v have\n"
         "taps that depend on the token: static taps\n+ a product with x, which rounds.", 1.7),
        ("In float32 and float64 models no diamond\nrounds; in float64, what is float32 here is\nfloat64.", 0.74),
    )  # fmt: skip
    for text, y in texts:
        page.label(7.5, y, text, 9.3, align="left")


legend()
attention_half()
experts_half()
notes()
save(page.figure, __file__)
