"""Draw figures/memory.svg and .png: what Small's weights and the state of one conversation weigh, up to 1M tokens."""

from dataclasses import replace

from drawing import FULL, INK, PLAIN, SLIDING, save, tint
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from inkling_ref.config import FULL as FULL_LAYER
from inkling_ref.config import InklingConfig
from inkling_ref.measure.cost import cache_bytes, checkpoint_bytes
from inkling_ref.notebook import COLOURS

SMALL = InklingConfig.small()
UNITS = {1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB"}


def size(count: float) -> str:
    unit = next(unit for unit in UNITS if count >= unit)
    return f"{count / unit:.3g} {UNITS[unit]}"


def weights(axes) -> None:
    """One bar a checkpoint, split by what its values are stored as."""
    checkpoints = {
        "nvfp4+mxfp8": "NVFP4 experts, the last sixth MXFP8",
        "mxfp8": "MXFP8 experts",
        "bf16": "bfloat16 experts",
    }
    others = sum(checkpoint_bytes(SMALL, "mxfp8")[name] for name in ("bfloat16", "float32"))
    for place, (name, title) in enumerate(checkpoints.items()):
        sizes = checkpoint_bytes(SMALL, name)
        parts = {"NVFP4": 0.85, "MXFP8": 0.55, "bfloat16": 0.25}  # format: shade
        left = others / 1e9
        axes.barh(place, left, 0.46, color=PLAIN)
        for part, shade in parts.items():
            width = sum(n for key, n in sizes.items() if key.startswith(part)) - (others if part == "bfloat16" else 0)
            width = max(0, width) / 1e9
            axes.barh(place, width, 0.46, left=left, color=tint(COLOURS["moe"], shade))
            if width > 150:  # the same shade is named in another bar
                ink = "white" if shade > 0.6 else INK
                axes.text(left + width / 2, place, part, ha="center", va="center", fontsize=9, color=ink)
            left += width
        axes.text(left + 20, place, size(sizes.total()), va="center")
        axes.text(0, place + 0.29, title, va="bottom")
    axes.text(0, -0.31, f"grey: all that is no expert, {size(others)}", va="top", fontsize=9)
    axes.set(xlim=(0, 1480), ylim=(-0.75, 2.75), title="Weights of Small", xlabel="GB")
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])


def caches(axes) -> None:
    """Bytes against context, by part; beside them, what 48 full layers would keep."""
    contexts = [2**i for i in range(21)]
    text = SMALL.text
    all_full = replace(SMALL, text=replace(text, layer_types=[FULL_LAYER] * text.num_hidden_layers))
    lines = {part: [cache_bytes(SMALL, n)[part] for n in contexts] for part in cache_bytes(SMALL, 1)}
    totals = [cache_bytes(SMALL, n).total() for n in contexts]
    without = [cache_bytes(all_full, n).total() for n in contexts]

    full, sliding = (text.layer_types.count(kind) for kind in (FULL_LAYER, text.layer_types[0]))
    looks = {
        "full layers": (FULL, f"keys and values of {full} full layers"),
        "sliding layers": (SLIDING, f"keys and values of {sliding} sliding layers"),
        "convolution states": (COLOURS["conv"], f"inputs of {4 * (full + sliding)} convolutions"),
    }
    axes.plot(contexts, without, color=PLAIN, ls="--", lw=1.6)
    axes.plot(contexts, totals, color=INK, lw=2.6)
    for part, (colour, _) in looks.items():
        axes.plot(contexts, lines[part], color=colour, lw=2)
    ends = [
        (without[-1], 1.0, f"if all {full + sliding} layers were full", COLOURS["text"]),
        (totals[-1], 1.35, "all of it", INK),
        *((lines[part][-1], 1.0, name, colour) for part, (colour, name) in looks.items()),
    ]
    ends[2] = (ends[2][0], 0.62, *ends[2][2:])  # 34.4 of 34.5 GB: two lines that end as one
    for end, lift, name, colour in ends:
        axes.text(1.25 * contexts[-1], end * lift, f"{size(end)}  {name}", va="center", color=colour)
    axes.set(xscale="log", yscale="log", xlim=(1, contexts[-1]), ylim=(2e4, 6e11))
    axes.set(title="State of one conversation, keys and values in bfloat16", xlabel="context, tokens")
    axes.xaxis.set_major_locator(FixedLocator([1, 32, 1024, 32768, 1048576]))
    assert text.sliding_window_size == 1024
    axes.set_xticklabels(["1", "32", "1k = W", "32k", "1M"])
    axes.yaxis.set_major_locator(FixedLocator([1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11]))
    axes.set_yticklabels([size(n) for n in axes.get_yticks()])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#e6e8ea", lw=0.8)


figure = Figure(figsize=(11, 4.4))
weights(figure.add_axes((0.02, 0.13, 0.29, 0.77)))
caches(figure.add_axes((0.385, 0.13, 0.3, 0.77)))
save(figure, __file__)
