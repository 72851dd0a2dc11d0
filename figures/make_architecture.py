"""Draw figures/architecture.svg and .png: the whole model, and one layer from the inside."""

from drawing import FULL, INK, PLAIN, SLIDING, Page, save, tint

from inkling_ref.config import InklingConfig
from inkling_ref.measure.cost import parameters
from inkling_ref.notebook import COLOURS

RESIDUAL, CONV, EXPERTS, VISION = (COLOURS[concept] for concept in ("residual", "conv", "moe", "vision"))
SMALL, NANO = InklingConfig.small(), InklingConfig.nano()
page = Page(11.0, 10.2)


def image_encoder() -> None:
    page.panel(0.15, 0.2, 2.5, 4.85, "Image encoder", VISION)
    x, width, mid = 0.35, 2.1, 1.4
    merge, patch = SMALL.vision.spatial_merge_size, SMALL.vision.patch_size
    steps = [
        (0.45, 0.4, "picture, size kept"),
        (1.13, 0.64, f"tiles of {merge} x {merge} patches,\na patch is {patch} x {patch} pixels"),
        (2.05, 0.64, "patch embedding\n+ resampled position grid"),
        (2.97, 0.64, f"{SMALL.vision.num_hidden_layers} layers: attention with\n2-D rotary, GELU MLP"),
        (3.89, 0.64, f"a tile's {merge**2} patches\nto one token"),
    ]
    for (y, height, text), following in zip(steps, [*steps[1:], None], strict=True):
        page.box(x, y, width, height, text, VISION, 0.16, size=9.6)
        if following:
            page.arrow((mid, y + height), (mid, following[0]))


def sizes() -> None:
    page.panel(0.15, 5.3, 2.5, 4.7, "Sizes", PLAIN)
    texts = SMALL.text, NANO.text
    totals = [parameters(config).total() for config in (SMALL, NANO)]
    rows = [
        ("", ["Small", "nano"]),
        ("parameters", [f"{totals[0] / 1e9:.0f} B", f"{totals[1] / 1e6:.1f} M"]),
        ("layers", [f"{t.num_hidden_layers}" for t in texts]),
        ("hidden size D", [f"{t.hidden_size}" for t in texts]),
        ("heads H", [f"{t.num_attention_heads}" for t in texts]),
        ("key/value heads G", [f"{t.num_key_value_heads}" for t in texts]),
        ("head size d", [f"{t.head_dim}" for t in texts]),
        ("window W", [f"{t.sliding_window_size}" for t in texts]),
        ("bias extent X", [f"{t.rel_extent}" for t in texts]),
        ("experts E", [f"{t.n_routed_experts}" for t in texts]),
        ("chosen k", [f"{t.num_experts_per_tok}" for t in texts]),
        ("expert width I", [f"{t.moe_intermediate_size}" for t in texts]),
        ("vocabulary V", [f"{t.vocab_size}" for t in texts]),
    ]
    for i, (name, values) in enumerate(rows):
        y = 9.38 - 0.317 * i
        page.label(0.3, y, name, size=9.8, align="left")
        for x, value in zip((1.99, 2.53), values, strict=True):
            page.label(x, y, value, size=9.8, align="right", weight="bold" if i == 0 else "normal")
    page.line((0.3, 9.22), (2.53, 9.22), colour=tint(PLAIN, 0.7), width=1)


def whole_model() -> None:
    L, size = SMALL.text.num_hidden_layers, SMALL.text.n_layers_per_attn_res_block
    page.panel(2.9, 0.2, 3.65, 9.8, f"The model: {L // size} blocks of {size} layers", RESIDUAL)
    x, width, mid = 3.12, 2.1, 4.17
    page.box(x, 0.45, width, 0.4, "token ids", PLAIN, 0.12)
    page.box(x, 1.13, width, 0.4, "embedding, RMSNorm")
    page.arrow((mid, 0.85), (mid, 1.13))
    # Image features replace the embedding, after its norm, at image-token positions.
    page.arrow((2.45, 4.21), (2.775, 4.21), (2.775, 1.66), (mid, 1.66), colour=VISION, width=1.8)
    page.label(3.42, 1.79, "at image tokens", 8.8, VISION)

    rails, top = [5.5, 5.8, 6.1], 8.53
    blocks = [(2.08, 0, 1), (4.13, size, 2), (6.5, L - size, 3)]  # from below: bottom, first layer, sources
    below = 1.53
    for (bottom, first, sources), rail in zip(blocks, rails, strict=True):
        # The sum that enters the block becomes a source, read by every sublayer from here on.
        source = bottom - 0.2
        page.line((mid, source), (rail, source), (rail, top), colour=RESIDUAL, width=1.6)
        if sources < 3:
            page.arrow((mid, below), (mid, bottom))
        else:
            page.line((mid, below), (mid, below + 0.2))
            page.arrow((mid, bottom - 0.32), (mid, bottom))
        page.dot(mid, source, RESIDUAL, 0.065)
        for i in range(size):
            is_full = SMALL.text.attention(first + i).window is None
            colour, text = (FULL, "full attention") if is_full else (SLIDING, "sliding attention")
            page.box(x, bottom + 0.26 * i, width, 0.225, text, colour, 0.5, size=9.3)
        y = bottom + 0.78
        page.arrow((rail, y), (x + width, y), colour=RESIDUAL, width=1.4)
        for crossed in rails[:sources]:
            page.dot(crossed, y, RESIDUAL)
        below = bottom + 1.535
        page.label(x, bottom + 1.68, f"layers {first} to {first + size - 1}", size=9.0, align="left")
    for i in range(3):
        page.dot(mid, 5.94 + 0.1 * i, INK, 0.026)
        page.dot(5.95, 6.14 + 0.1 * i, RESIDUAL, 0.026)
    page.label(6.37, 4.6, "completed sums: a source each, read by all that follow", 9.0, RESIDUAL, rotation=90)

    page.box(x, top, 6.25 - x, 0.38, "mix the sources over depth", RESIDUAL, 0.3)
    page.arrow((mid, below), (mid, top))
    cap = f"{SMALL.text.final_logit_softcapping:g}"
    page.box(x, 9.13, 6.25 - x, 0.38, f"RMSNorm, unembedding, {cap} tanh(z / {cap})", size=9.6)
    page.arrow((mid, top + 0.38), (mid, 9.13))


def one_layer() -> None:
    page.panel(6.8, 0.2, 4.05, 9.8, "Inside one layer", FULL)
    stream, x, width = 7.08, 7.4, 3.25
    mid = x + width / 2

    def mixture(y: float, text: str, height: float) -> None:
        page.box(x, y, width, height, text, RESIDUAL, 0.3, size=9.6)
        page.arrow((stream, y + height / 2), (x, y + height / 2), colour=RESIDUAL)
        page.dot(stream, y + height / 2, RESIDUAL)

    def join(y: float, start: float) -> None:
        page.arrow((mid, start), (mid, y), (stream + 0.11, y))
        page.plus(stream, y)

    page.arrow((stream, 0.45), (stream, 9.85), width=2.2)
    page.label(x, 0.62, "sources: the running and the completed sums", 9.3, RESIDUAL, align="left")
    mixture(0.85, "mix over depth: softmax of q·RMS(source)\nfull layers: one mixture each for q, k and v", 0.6)
    page.arrow((mid, 1.45), (mid, 1.65))
    page.box(x, 1.65, width, 0.34, "RMSNorm")

    columns = {"q": 7.4, "r": 8.06, "k": 8.72, "v": 9.38, "gate,\nsink": 10.04}
    for name, left in columns.items():
        page.arrow((left + 0.305, 1.99), (left + 0.305, 2.21))
        page.box(left, 2.21, 0.61, 0.4, name, size=10 if len(name) == 1 else 8.4)
        page.arrow((left + 0.305, 2.61), (left + 0.305, 2.83 if len(name) == 1 else 5.04))
    page.box(7.4, 2.83, 1.27, 0.92, "scale, L2 clip;\nfull layers:\nlog scaling", size=9.3)
    page.box(8.72, 2.83, 1.27, 0.44, "short conv; full\nlayers: dynamic", CONV, 0.35, size=9.0)
    for name, left in {"L2 clip": 8.72, "RMS": 9.38}.items():
        page.arrow((left + 0.305, 3.27), (left + 0.305, 3.45))
        page.box(left, 3.45, 0.61, 0.3, name, size=9.2)
    for name in "qrkv":
        page.arrow((columns[name] + 0.305, 3.75), (columns[name] + 0.305, 3.95))
    attention = "softmax(q·k + r·P[distance], sink)·v\nsliding: the last W keys; full: all"
    page.box(x, 3.95, 2.59, 0.86, attention, FULL, 0.32, size=9.3)
    page.arrow((10.345, 4.38), (x + 2.59, 4.38))  # the sink
    page.arrow((x + 1.295, 4.81), (x + 1.295, 5.04))
    page.box(x, 5.04, width, 0.34, "× sigmoid(gate), output projection", size=9.6)
    page.arrow((mid, 5.38), (mid, 5.6))
    page.box(x, 5.6, width, 0.34, "short conv", CONV, 0.35)
    join(6.17, 5.94)
    page.label(mid + 0.12, 6.17, "the first layer of a block\nstarts the sum anew", 8.6, RESIDUAL, align="left")

    mixture(6.42, "mix over depth", 0.36)
    page.arrow((mid, 6.78), (mid, 6.98))
    page.box(x, 6.98, width, 0.34, "RMSNorm")
    page.arrow((mid, 7.32), (mid, 7.54))
    page.box(x, 7.54, width, 0.34, "router: top k of sigmoid score + bias", EXPERTS, 0.22, size=9.6)
    page.box(x, 8.1, width, 0.66, "", EXPERTS, 0.08)
    for i in range(12):
        chosen = i in (1, 4, 9)
        left = x + 0.11 + 0.255 * i
        page.box(left, 8.44, 0.2, 0.23, "", EXPERTS, 0.8 if chosen else 0.15)
        if chosen:
            page.arrow((left + 0.1, 7.88), (left + 0.1, 8.1), colour=EXPERTS)
    page.label(mid, 8.27, "k of E experts, soft-capped SwiGLU", size=9.3)
    page.arrow((mid, 8.76), (mid, 8.97))
    page.box(x, 8.97, width, 0.34, "short conv", CONV, 0.35)
    join(9.5, 9.31)


image_encoder()
sizes()
whole_model()
one_layer()
save(page.figure, __file__)
