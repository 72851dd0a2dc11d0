"""Golden sets: small checkpoints and what a right implementation computes from them, for people who port the model.

A set is a folder:

    golden.json                          version, seed, the cases with their tolerances, every file's SHA-256
    README.md                            how to read it, without Python too
    checkpoints/NAME/                    as released: config.json, *.safetensors, hf_quant_config.json
    traces/CASE.safetensors              every section of the case's pass; its manifest holds prompt and decoded tokens
    pictures/N.png                       what the case with pictures shows

Cases are corners: each exists because ports have been wrong there (see `CASES`). Weights are random, so large that
every clip, cap and norm acts. In a set's passes no choice of experts is a near tie: weights are drawn again until the
scores at the cut are `margin` apart everywhere. So a difference in rounding stays one, and the tolerances can be
narrow: relative RMS error, section by section.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .. import checkpoint as checkpoints
from ..config import FULL, SLIDING, InklingConfig, TextConfig, VisionConfig
from ..errors import InputError
from ..model import Inkling
from ..vision import load_image, process_images
from .sections import SECTIONS, parse
from .trace import Trace, trace

VERSION = 1
_TRIES = 200  # seeds to try for a set without near ties

_S, _F = SLIDING, FULL
_DENSE = InklingConfig(
    TextConfig(
        vocab_size=31, unpadded_vocab_size=28, hidden_size=24, num_hidden_layers=4, layer_types=[_S, _S, _F, _S],
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, swa_num_attention_heads=6,
        swa_num_key_value_heads=3, swa_head_dim=7, sliding_window_size=5, d_rel=8, rel_extent=11,
        n_layers_per_attn_res_block=2, moe_intermediate_size=9, n_routed_experts=7, num_experts_per_tok=3,
        route_scale=2.5, qk_l2_clip_threshold=3.0, rel_l2_clip_threshold=2.0, log_scaling_n_floor=6,
        log_scaling_alpha=0.4, mlp_gate_softcap=1.5, mlp_up_softcap=2.0, final_logit_softcapping=9.0,
        max_position_embeddings=64, eos_token_id=None,
    ),
    VisionConfig(16, 1, 2, 18, patch_size=3, posemb_grid_size=4, projection_hidden_dim=13),
    image_token_id=27,
)  # fmt: skip
_QUANTISED = InklingConfig(
    replace(
        _DENSE.text, hidden_size=32, num_hidden_layers=3, layer_types=[_S, _F, _S], moe_intermediate_size=64,
        n_routed_experts=5, num_experts_per_tok=2,
    ),
    None,
)  # fmt: skip
_OTHER = InklingConfig(
    replace(
        _DENSE.text, num_hidden_layers=3, layer_types=[_F, _S, _F], n_layers_per_attn_res_block=1,
        num_key_value_heads=1, conv_kernel_size=3, sliding_window_size=9, rel_extent=4,
    ),
    None,
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights.

    experts, shard_bytes: as `save` takes them; neutral: the router's weights and the mixtures' queries are zero.
    """

    why: str
    config: InklingConfig
    experts: str | None = None
    shard_bytes: int | None = None
    neutral: bool = False


CHECKPOINTS = {
    "dense": Checkpoint("float32, text and pictures", _DENSE),
    "released": Checkpoint("bfloat16 with float32 exceptions, in shards with an index", _DENSE, "bf16", 12_000),
    "nvfp4": Checkpoint("experts NVFP4 in layers 0 and 1, MXFP8 in layer 2", _QUANTISED, "nvfp4+mxfp8"),
    "mxfp8": Checkpoint("all experts MXFP8", _QUANTISED, "mxfp8"),
    "other": Checkpoint("full layer first, blocks of one layer, one key/value head, three taps, short extent", _OTHER),
    "neutral": Checkpoint(
        "zero router and correction bias: all scores tie; zero queries: every mixture is the mean",
        replace(_DENSE, vision=None, text=replace(_DENSE.text, num_hidden_layers=2, layer_types=[_S, _F])),
        neutral=True,
    ),
}


@dataclass(frozen=True)
class Case:
    """One pass over a checkpoint.

    lengths: of the prompt's rows; decode: tokens read after it; sections: as `trace` takes them; pictures: the prompt
    has two; quantize: activations are fake-quantised as well; draft: (tokens read and taken back, of which accepted).
    margin: least distance of router scores at the cut. tolerance: relative RMS error of a section.
    """

    why: str
    checkpoint: str
    lengths: tuple[int, ...]
    decode: int = 0
    dtype: str = "float32"
    sections: tuple[str, ...] | None = None
    pictures: bool = False
    quantize: bool = False
    draft: tuple[int, int] | None = None
    margin: float = 1e-3
    tolerance: float = 1e-4


_BRIEF = ("probabilities", "attention.gated", "biased", "chosen", "moe.*.out", "layer.*.out", "logits")
_BF16 = {"dtype": "bfloat16", "margin": 1e-2, "tolerance": 0.2}
CASES = {
    "everything": Case("every section, the large ones too", "dense", (14,), decode=2, sections=("all",)),
    "edges": Case(
        "one token; the window less one, whole, and one more; the bias's extent less one, whole, and one more",
        "dense", (1, 4, 5, 6, 10, 11, 12), sections=_BRIEF,
    ),
    "padded": Case("rows of 13, 2 and 7 tokens, prompt and decoding", "dense", (13, 2, 7), decode=2, sections=_BRIEF),
    "pictures": Case(
        "two pictures, one with transparency: processing, encoder, places in the text", "dense", (11,), decode=1,
        sections=("vision.*", "embedding.out", "biased", "chosen", "layer.*.out", "logits"), pictures=True,
    ),
    "rejection": Case(
        "4 drafted tokens are read and all but 1 taken back; decoding goes on as if they had never been there",
        "dense", (8,), decode=3, draft=(4, 1),
    ),
    "bfloat16": Case("the stream in 16 bits", "released", (9,), decode=1, **_BF16),
    "nvfp4": Case("decoded experts, float32 arithmetic", "nvfp4", (9,), sections=("+expert_out",)),
    "nvfp4-activations": Case(
        "activations quantised as well: a rounding difference may move a code to its neighbour", "nvfp4", (5,),
        sections=("+activation",), quantize=True, tolerance=0.02,
    ),
    "mxfp8": Case("decoded experts, float32 arithmetic", "mxfp8", (7,), sections=("+expert_out",)),
    "other": Case("sizes and orders that the release does not have", "other", (13,), decode=1),
    "neutral": Case("ties go to the lower id; uniform mixtures", "neutral", (6,), margin=0.0),
}  # fmt: skip


def randomize(module: torch.nn.Module, seed: int = 0, device: str = "cpu") -> None:
    """Random parameters under which every term matters.

    No bias, tap, scale or norm weight is neutral; mixture queries give scores of standard deviation 1.5; matrices keep
    the variance at 2 or so, so that clips and soft caps of small thresholds act on some vectors and not on others.
    The numbers of a seed differ between devices.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64, device=device)
        if "norm" in name or ".ln_" in name or name.endswith(("clip.scale", "gamma")):
            value = 0.2 * noise if name.endswith("bias") else 1 + 0.3 * noise
        elif ".attn_res." in name:
            value = 1.5 * noise
        elif name.endswith(("sconv.weight", "static_w")):
            value = 0.7 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif name.endswith(("embed.weight", "_embedding", "logits_proj.proj")):
            value = noise
        else:  # matrices, [rows, columns]
            value = 1.5 * noise / math.sqrt(p.shape[-1])
        p.data.copy_(value)


def make_golden(folder: str | Path, cases: Sequence[str] | None = None, seed: int = 0) -> int:
    """Write a set, whole or not at all.

    Args:
        folder: must not exist yet.
        cases: names of `CASES`; None: all.
        seed: the first to try for each checkpoint.

    Returns: bytes written.

    Raises:
        InputError: an unknown case, a folder that is there already, or no seed without near ties.
    """
    folder, names = Path(folder), list(CASES if cases is None else dict.fromkeys(cases))
    if unknown := [name for name in names if name not in CASES]:
        raise InputError(f"case {unknown[0]!r}: expected some of {', '.join(CASES)}")
    if folder.exists():
        raise InputError(f"{folder}: is there already, expected a new folder")
    partial = folder.absolute().parent / f".{folder.absolute().name}.partial-{os.getpid()}"
    try:
        for part in ("checkpoints", "traces"):
            (partial / part).mkdir(parents=True)
        used = {name: _make_checkpoint(partial, name, names, seed) for name in CHECKPOINTS if _cases_of(name, names)}
        _write_texts(partial, names, used)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cases_of(checkpoint: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if CASES[name].checkpoint == checkpoint]


def _make_checkpoint(folder: Path, name: str, cases: Sequence[str], first: int) -> int:
    """Weights for which no case of the checkpoint has a near tie, and their traces. Returns the seed."""
    kind, path = CHECKPOINTS[name], folder / "checkpoints" / name
    for seed in range(first, first + _TRIES):
        model = Inkling(kind.config).eval().requires_grad_(False).double()
        randomize(model, seed)
        if kind.neutral:
            for parameter_name, parameter in model.named_parameters():
                if ".attn_res." in parameter_name or ".mlp.gate." in parameter_name:
                    parameter.data.zero_()
        checkpoints.save(model.cast(torch.float32), path, experts=kind.experts, shard_bytes=kind.shard_bytes)
        traces = {}
        for case in _cases_of(name, cases):
            traces[case] = run_case(path, case, seed, folder / "pictures")
            if least_margin(traces[case]) < CASES[case].margin:
                break
        else:
            for case, made in traces.items():
                made.save(folder / "traces" / f"{case}.safetensors")
            return seed
    raise InputError(f"checkpoint {name!r}: near ties with every seed from {first} to {first + _TRIES - 1}")


def least_margin(recorded: Trace) -> float:
    """The least distance of biased router scores at the cut, over all tokens; infinite where none was recorded."""
    margins = [math.inf]
    for name, scores in recorded.tensors.items():
        if parse(name).section.name == "moe.{i}.biased":
            k = recorded.tensors[name.replace("biased", "chosen")].shape[-1]
            best = scores.float().sort(dim=-1, descending=True).values
            gaps = best[..., k - 1] - best[..., k]
            lengths = [len(row) for row in recorded.manifest["prompt"]]
            rows = [gap[: n if parse(name).step == 0 else 1] for gap, n in zip(gaps, lengths, strict=True)]
            margins.append(float(torch.cat(rows).min()))
    return min(margins)


def pictures(folder: Path, config: VisionConfig) -> tuple[Tensor, Tensor]:
    """Two pictures, 2 x 3 tiles and 1 tile, written as PNG where they are not yet, and processed."""
    folder.mkdir(exist_ok=True)
    side, levels = config.tile_size, np.random.default_rng(0)
    for number, size in enumerate([(2 * side, 3 * side - 1, 3), (side - 1, side, 4)], start=1):
        if not (folder / f"{number}.png").exists():
            Image.fromarray(levels.integers(256, size=size, dtype=np.uint8)).save(folder / f"{number}.png")
    return process_images([load_image(folder / f"{number}.png") for number in (1, 2)], config)


def run_case(checkpoint: Path, name: str, seed: int, picture_folder: Path, dtype: str | None = None) -> Trace:
    """The trace of a case, as the checkpoint's stored weights give it (in another dtype if one is named)."""
    case = CASES[name]
    model = checkpoints.load(checkpoint, dtype=getattr(torch, dtype or case.dtype))
    model.quantize_activations(case.quantize)
    generator, image = torch.Generator().manual_seed(seed), model.config.image_token_id
    highest = min(image, model.config.text.unpadded_vocab_size)
    rows = [torch.randint(highest, (n,), generator=generator).tolist() for n in case.lengths]
    decode = torch.randint(highest, (len(rows), max(case.decode, 1)), generator=generator)
    about = {"case": name, "checkpoint": case.checkpoint, "tolerance": case.tolerance}
    images: dict[str, Tensor] = {}
    if case.pictures:
        images = dict(
            zip(("pixel_values", "image_grid_thw"), pictures(picture_folder, model.config.vision), strict=True)
        )
        rows[0][1:7], rows[0][8] = [image] * 6, image
        about["pictures"] = ["pictures/1.png", "pictures/2.png"]
    if case.quantize:
        about["activations"] = "fake-quantised in the format of each layer's experts before both of their products"
    if case.draft:
        drafted, accepted = case.draft
        draft = torch.randint(highest, (drafted,), generator=generator).tolist()
        about["rejection"] = {"prompt": case.lengths[0], "draft": draft, "accepted": accepted}
        rows[0] += draft[:accepted]
    made = trace(model, rows, **images, decode=decode if case.decode else 0, sections=case.sections)
    if case.draft:
        _check_rejection(model, made, about["rejection"])
    made.manifest |= about
    return made


def _check_rejection(model: Inkling, made: Trace, rejection: dict) -> None:
    """That the cache, after the draft was read and taken back, gives the logits of the trace, which never saw it."""
    n, draft, accepted = (rejection[key] for key in ("prompt", "draft", "accepted"))
    prompt = made.manifest["prompt"][0]
    with torch.inference_mode():
        cache = model.new_cache()
        model(torch.tensor([prompt[:n]]), cache=cache)
        model(torch.tensor([draft]), cache=cache)
        cache.crop(n + accepted)
        for step, token in enumerate(made.manifest["decoded"][0], start=1):
            logits = model(torch.tensor([[token]]), cache=cache).logits
            expected = made.tensors[f"step.{step}.logits"]
            error = float((logits - expected).norm() / expected.norm())
            # Over all logits: single ones may be further off, on one processor more than on another.
            assert error < 1e-5, f"step {step}: {error:.1e} off the logits of a cache that never saw the draft"


def _write_texts(folder: Path, names: Sequence[str], seeds: dict[str, int]) -> None:
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    golden = {
        "version": VERSION,
        "checkpoints": {name: {"seed": seed, "why": CHECKPOINTS[name].why} for name, seed in seeds.items()},
        "cases": {
            name: {
                "why": CASES[name].why, "checkpoint": CASES[name].checkpoint, "trace": f"traces/{name}.safetensors",
                "dtype": CASES[name].dtype, "tolerance": CASES[name].tolerance,
            }
            for name in names
        },
        "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
    }  # fmt: skip
    (folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    weights = [f"- `{name}`: {about['why']}" for name, about in golden["checkpoints"].items()]
    cases = [
        f"| {name} | {case['checkpoint']} | {case['dtype']} | {case['tolerance']:g} | {case['why']} |"
        for name, case in golden["cases"].items()
    ]
    rows = [f"| `{s.name}` | {s.shape} | {s.computes}{' (on request)' if s.on_request else ''} |" for s in SECTIONS]
    text = _README.format(version=VERSION, weights="\n".join(weights), cases="\n".join(cases), rows="\n".join(rows))
    (folder / "README.md").write_text(text, encoding="utf-8")


_README = """\
# Golden set, version {version}

Written by `inkling-ref make-golden`: small checkpoints, and every section of the forward passes that a right
implementation makes with them. Load a checkpoint of `checkpoints/`, run the tokens of a trace, compare.

A trace is a safetensors file. Its header's `__metadata__` holds, under `inkling_trace`, a JSON text with `prompt` (the
ids of every row, without padding), `decoded` (the ids that the decoding steps read), `images` (the pictures' grids, in
tiles), `config` and `tolerance`. `golden.json` lists the cases, and the SHA-256 of every file.

A section passes if the root mean square of the difference, over that of the expected values, is at most the case's
tolerance; integers are equal. No choice of experts is a near tie, except in `neutral`, where all scores tie and the
lower id wins.

## Checkpoints

{weights}

## Cases

| Case | Weights | Stream | Tolerance | Why |
|---|---|---|---|---|
{cases}

In `rejection` the manifest's `rejection` says which tokens are read after the first tokens of the prompt, and how many
of them stay; the trace is that of a run which never read the others. In `nvfp4-activations` what enters the experts'
products is quantised and decoded again, in the format of that layer's experts.

## Sections

In data-flow order. Decoding step n has the prefix `step.n.`. Rows of unequal length end in zeros. S: keys by position
from 0; what a query does not see is zero. Experts are listed in ascending order of their ids.

| Name | Shape | What |
|---|---|---|
{rows}
"""
