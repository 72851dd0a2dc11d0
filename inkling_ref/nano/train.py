r"""Train nano: a plain loop around the package's own model, on one GPU or, smaller, on a CPU.

    inkling-ref train-nano OUT --minutes 8

**Two copies of the weights.** `master` is an `Inkling` in float32; the optimisers change it. `model` is an `Inkling`
in bfloat16, rounded from the master before every step, its experts rounded all the way to the values that NVFP4 and
MXFP8 can store; the forward and backward pass run on it. Its gradients are applied to the masters as if there had
been no rounding (a straight-through estimator):

$$ W \leftarrow W - \eta \; \mathrm{step}\Big( \frac{\partial \mathrm{loss}}{\partial Q} \Big), \qquad
   Q = \mathrm{round}(W) $$

So training sees at every step exactly what the shipped file will hold.

**Batches** of two kinds, each of one shape. Short rows every step: pictures, stories, sums, talk. Long rows every third
step: stories, large pictures, codes hidden in 4,096 tokens. Loss: cross-entropy, weight 1 on answers and 0.1 on the
text around them; while rates are high, also which coloured shape has its centre in which image tile.

**Optimisers.** Muon for matrices (see `muon`), AdamW for all else. The router's correction bias takes no part in the
loss; it moves towards even loads, and stands still for the last 3 %:

$$ b_e \leftarrow b_e + 10^{-3} \, \mathrm{clamp}(1 - E \, \mathrm{load}_e, -1, 1) $$

**Speed.** On a GPU: operations in fixed shapes (see `training_ops`), compiled in small pieces, and each kind of batch
recorded as one CUDA graph.
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checkpoint
from ..backends import Backend
from ..cache import Step
from ..chat import END_SAMPLING, Tokenizer
from ..config import InklingConfig
from ..errors import InputError
from ..files import whole_file
from ..model import Inkling, TextModel
from ..quantization import NVFP4, fake_mxfp8_weight, fake_nvfp4_weight
from ..residual import rms_norm
from ..vision import LEVEL_CENTRE, LEVEL_SCALE, PAD_LEVEL
from . import rows
from .muon import Muon
from .rows import ANSWER, TEXT
from .training_ops import route, training_backend
from .vocabulary import SHIPPED
from .world.scenes import COLOURS, SHAPES

N_COLOURS, N_SHAPES = len(COLOURS), len(SHAPES)
MUON_RATE = 0.015
ADAM_RATES = {"embedding": 4.5e-3, "queries": 6e-3, "rest": 3e-3}
RESUME_AT = 0.6  # of the schedule: resumed weights are past the high rates
LONG_EVERY, LONG_WEIGHT = 3, 0.6  # steps; of the long rows' loss

# ---------------------------------------------------------------- presets


@dataclass(frozen=True)
class Shape:
    """The fixed shape of one kind of batches."""

    rows: int
    length: int
    pictures: int
    tiles: int  # of one picture, at most

    @classmethod
    def short(cls, rows_: int, length: int) -> "Shape":
        """The bounds that rows.short_batch keeps."""
        return cls(rows_, length, pictures=13 * rows_ // 16, tiles=rows.SHORT_TILES)

    @classmethod
    def long(cls, rows_: int, length: int) -> "Shape":
        """The bounds that rows.long_batch keeps."""
        return cls(rows_, length, pictures=rows.max_long_pictures(rows_, length), tiles=rows.LONG_TILES)


@dataclass(frozen=True)
class Preset:
    """What is trained, on which batches."""

    config: InklingConfig
    shapes: dict[str, Shape]
    workers: dict[str, int]
    warmup: int  # steps


def preset(name: str) -> Preset:
    """nano: the shipped model, for a GPU. mini: six layers and short rows only, for two minutes on a CPU.

    Raises:
        InputError: for another name.
    """
    config = InklingConfig.nano()
    if name == "nano":
        shapes = {"short": Shape.short(256, 128), "long": Shape.long(8, 4096)}
        return Preset(config, shapes, {"short": 11, "long": 4}, warmup=150)
    if name == "mini":
        text = replace(config.text, num_hidden_layers=6, layer_types=[], n_layers_per_attn_res_block=2)
        return Preset(replace(config, text=text), {"short": Shape.short(8, 128)}, {"short": 1}, warmup=10)
    raise InputError(f"preset {name!r}: expected 'nano' or 'mini'")


# ---------------------------------------------------------------- batches


def to_tensors(batch: rows.Batch, shape: Shape, image_token_id: int) -> dict[str, Tensor]:
    """A batch in fixed shapes, but for the tiles, of which only the real ones travel.

    `index` names the tile in each place of each picture, `slots` the token it becomes (one past the end: none).
    """
    labels, worth = np.zeros_like(batch.ids), np.zeros_like(batch.targets)
    labels[:, :-1], worth[:, :-1] = batch.ids[:, 1:], batch.targets[:, 1:]
    index = np.zeros((shape.pictures, shape.tiles), np.int32)
    slots = np.full((shape.pictures, shape.tiles), shape.rows * shape.length, np.int64)
    grids = np.zeros((shape.pictures, 2), np.int64)
    grids[: len(batch.grids)] = batch.grids
    places, start = np.flatnonzero(batch.ids == image_token_id), 0
    for i, n in enumerate(grids.prod(1)):
        index[i, :n] = np.arange(start, start + n)
        slots[i, :n] = places[start : start + n]
        start += n
    things = np.zeros((len(batch.tiles), N_COLOURS * N_SHAPES), np.uint8)
    tile, colour, form = batch.objects.T
    things[tile, colour * N_SHAPES + form] = 1
    arrays = {"ids": batch.ids, "labels": labels, "worth": worth, "index": index, "slots": slots, "grids": grids}
    arrays |= {"tiles": batch.tiles, "extents": batch.extents, "things": things}
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}


class Stream(torch.utils.data.IterableDataset):
    """Endless batches; every worker makes its share of the seeds."""

    def __init__(self, make: Callable, encoder: rows.Encoder, shape: Shape, seed: int) -> None:
        self.make, self.encoder, self.shape, self.seed = make, encoder, shape, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            batch = self.make(self.seed * 1_000_000 + number, self.encoder, self.shape.rows, self.shape.length)
            yield to_tensors(batch, self.shape, self.encoder.image_id)
            number += count


def pixels(
    tiles: UInt8[Tensor, "*places side side 3"], extents: UInt8[Tensor, "*places 2"]
) -> Float[Tensor, "*places side side 3"]:
    """Levels to what the encoder reads; outside the picture the level is -1."""
    side = torch.arange(tiles.shape[-2], device=tiles.device)
    inside = (side[:, None] < extents[..., 0, None, None]) & (side < extents[..., 1, None, None])
    return (torch.where(inside[..., None], tiles.float(), PAD_LEVEL) - LEVEL_CENTRE) / LEVEL_SCALE


# ---------------------------------------------------------------- parameters


def is_matrix(name: str) -> bool:
    """Whether Muon trains it: the big projections, the experts, and the encoder's linear maps."""
    text = ("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "gate_attn", "w13", "w2")
    vision = ("patch_embedding", "q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj", "proj_in", "proj_out")
    parts = name.removesuffix("_weight").removesuffix(".weight").split(".")
    return not name.endswith("bias") and parts[-1] in text + vision


def adam_group(name: str) -> str:
    """Which of ADAM_RATES a parameter learns with."""
    if name in ("llm.embed.weight", "llm.unembed.weight"):
        return "embedding"
    return "queries" if ".attn_res." in name else "rest"


def initialise(model: Inkling) -> None:
    """Starting values.

    No output projection starts at zero: a zero source of a residual mixture has a gradient a thousand times too large,
    since the mixture divides by the source's RMS.
    """
    for name, p in model.named_parameters():
        if is_matrix(name) or name.endswith("attn_sink_proj.weight"):
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        elif name.startswith("visual.") and name.endswith("bias"):
            nn.init.zeros_(p)
    nn.init.normal_(model.visual.backbone.embeddings.position_embedding, std=0.3)
    nn.init.normal_(model.llm.embed.weight, std=0.3)
    nn.init.normal_(model.llm.unembed.weight, std=0.02)
    for layer in model.llm.layers:
        nn.init.normal_(layer.attn.rel_logits_proj.proj, std=0.05)
        nn.init.normal_(layer.mlp.gate.weight, std=0.5 * layer.mlp.gate.weight.shape[1] ** -0.5)
        for conv in (layer.attn_sconv, layer.mlp_sconv):
            nn.init.normal_(conv.weight, std=0.15)
        for conv in (layer.attn.k_sconv, layer.attn.v_sconv):
            nn.init.normal_(conv.weight if layer.is_sliding else conv.static_w, std=0.5)
            if not layer.is_sliding:
                nn.init.normal_(conv.weight_proj, std=0.2 * conv.weight_proj.shape[1] ** -0.5)


# ---------------------------------------------------------------- one step


def embed(llm: TextModel, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """As `llm.embed_tokens`, as a product with one-hot rows: its backward is a product too, not a sort."""
    weight = llm.embed.weight
    one_hot = (ids[..., None] == torch.arange(weight.shape[0], device=ids.device)).to(weight.dtype)
    e = one_hot @ weight
    return rms_norm(e, llm.embed_norm.weight, llm.config.rms_norm_eps).to(e.dtype)


def losses(
    llm: TextModel, hidden: Float[Tensor, "N D"], labels: Int[Tensor, " N"], worth: UInt8[Tensor, " N"]
) -> tuple[Float[Tensor, ""], Float[Tensor, "2"]]:
    """The loss, and what it is on answers and on the text around them."""
    each = F.cross_entropy(llm.logits(hidden[None])[0], labels, reduction="none")
    answer, text = worth == ANSWER, worth == TEXT
    weight = answer + 0.1 * text
    parts = [(each.detach() * m).sum() / m.sum().clamp(min=1) for m in (answer, text)]
    return (each * weight).sum() / weight.sum(), torch.stack(parts)


class Kind:
    """One kind of batches: its inputs at fixed addresses, and forward + backward from them into the gradients."""

    def __init__(self, trainer: "Trainer", shape: Shape, weight: float) -> None:
        self.trainer, self.weight = trainer, weight
        B, T, P, N = shape.rows, shape.length, shape.pictures, shape.pictures * shape.tiles
        side = trainer.model.config.vision.tile_size
        sizes = {
            torch.int32: {"ids": (B, T), "labels": (B, T), "index": (P, shape.tiles)},
            torch.int64: {"slots": (P, shape.tiles), "grids": (P, 2)},
            torch.uint8: {
                "worth": (B, T), "tiles": (N, side, side, 3), "extents": (N, 2), "things": (N, N_COLOURS * N_SHAPES),
            },
        }  # fmt: skip
        device = trainer.device
        self.inputs = {
            n: torch.zeros(s, dtype=t, device=device) for t, names in sizes.items() for n, s in names.items()
        }
        self.step = Step([0] * B, torch.arange(T, device=device)[None])
        self.parts = torch.zeros(3, device=device)
        self.run = self.compute

    def load(self, batch: dict[str, Tensor]) -> None:
        for name, tensor in batch.items():
            self.inputs[name][: len(tensor)].copy_(tensor, non_blocking=True)

    def compute(self) -> None:
        """Adds the gradients of the batch in `inputs`; leaves the losses of answers, text and pictures in `parts`."""
        t, x = self.trainer, self.inputs
        model, index = t.model, x["index"]
        pictures = pixels(x["tiles"][index], x["extents"][index]).to(model.dtype)
        features = model.visual.encode(pictures, x["grids"], padded=True)

        e = embed(model.llm, x["ids"])
        spare = F.pad(e.flatten(0, 1), (0, 0, 0, 1))  # its last row takes what belongs nowhere
        e = spare.index_copy(0, x["slots"].flatten(), features.flatten(0, 1).to(e.dtype))[:-1].view_as(e)
        hidden = model.llm(e, self.step)
        loss, parts = t.losses(model.llm, hidden.flatten(0, 1), x["labels"].flatten().long(), x["worth"].flatten())

        # Which coloured shape has its centre in this tile? The encoder learns much faster when told directly.
        real = (x["slots"] < x["ids"].numel()).float()[..., None]
        seen = F.binary_cross_entropy_with_logits(
            t.picture_head(features.float()), x["things"][index].float(), weight=real, reduction="sum",
            pos_weight=t.positive_weight,
        ) / real.sum().clamp(min=1)  # fmt: skip
        torch._foreach_add_(
            t.gradients, torch.autograd.grad(self.weight * (loss + t.picture_weight * seen), t.parameters)
        )
        self.parts.copy_(torch.cat([parts, seen.detach()[None]]))


class Trainer:
    """Both copies of the weights, the optimisers, and one training step; on a GPU, as CUDA graphs."""

    def __init__(
        self,
        plan: Preset,
        device: torch.device,
        log: Callable[[str], None] = print,
        compile_options: dict[str, Any] | None = None,
    ) -> None:
        """compile_options: of torch.compile; None compiles nothing and runs the reference operations."""
        config, self.device, self.log = plan.config, device, log
        self.master = Inkling(config)
        initialise(self.master)
        self.master.to(device)
        if compile_options is None:  # on a CPU the reference is the faster one: it computes four experts a token
            self.losses, backend = losses, Backend(route=route)
        else:
            compiled = partial(torch.compile, **compile_options)
            self.losses, backend = compiled(losses), training_backend(compiled)
        self.model = (
            Inkling(config, backend).to(device).cast(torch.bfloat16 if device.type == "cuda" else torch.float32)
        )
        if compile_options is not None:
            # Small pieces, which all layers of a kind share: compiled in two minutes, not in twenty.
            layers = [m for layer in self.model.llm.layers for m in (layer.attn, layer.attn_sconv, layer.mlp_sconv)]
            for module in (*layers, *self.model.visual.backbone.layers):
                module.compile(**compile_options)

        def scalar(value: float = 0.0) -> Tensor:  # on the device: a CUDA graph reads it anew each time
            return torch.full((), value, device=device)

        self.picture_head = nn.Linear(config.text.hidden_size, N_COLOURS * N_SHAPES).to(device)  # dropped at the end
        self.picture_weight, self.positive_weight = scalar(), scalar(5.0)
        masters, working = dict(self.master.named_parameters()), dict(self.model.named_parameters())
        self.muon = Muon(p for n, p in masters.items() if is_matrix(n))
        self.muon_rate, self.balance_rate = scalar(), scalar()
        self.biases = [p for n, p in masters.items() if n.endswith("mlp.gate.bias")]
        E = config.text.n_routed_experts
        self.loads = torch.full((len(self.biases), E), 1 / E, device=device)  # moving average
        groups: dict[str, list] = {name: [] for name in ADAM_RATES}
        groups["rest"] += self.picture_head.parameters()
        for n, p in masters.items():
            if p.requires_grad and not is_matrix(n):
                groups[adam_group(n)].append(p)
        self.adam = torch.optim.AdamW(
            [{"params": members, "lr": scalar(), "name": name} for name, members in groups.items()],
            lr=scalar(), betas=(0.9, 0.98), weight_decay=0.0, fused=True, capturable=device.type == "cuda",
        )  # fmt: skip

        self.model.requires_grad_(True)  # the correction bias too: see training_ops.LoadAsGradient
        self.parameters = [*working.values(), *self.picture_head.parameters()]
        learning = [*masters.values(), *self.picture_head.parameters()]
        for p in learning:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.gradients = [p.grad for p in learning]
        self.plain = [(working[n], masters[n]) for n in masters if ".experts." not in n]
        self.round()
        weights = {"short": 1.0, "long": LONG_WEIGHT}
        self.kinds = {name: Kind(self, shape, weights[name]) for name, shape in plan.shapes.items()}

    @torch.no_grad()
    def round(self) -> None:
        """The working copy, from the masters: experts to storable values, the rest to the working dtype."""
        targets, sources = zip(*self.plain, strict=True)
        torch._foreach_copy_(targets, sources)
        layers = list(zip(self.model.llm.layers, self.master.llm.layers, strict=True))
        first = checkpoint.layer_formats("nvfp4+mxfp8", len(layers)).count(NVFP4)
        for members, fake in ((layers[:first], fake_nvfp4_weight), (layers[first:], fake_mxfp8_weight)):
            for name in checkpoint.MATRICES:
                pairs = [[getattr(layer.mlp.experts, name) for layer in pair] for pair in members]
                targets, sources = zip(*pairs, strict=True)
                torch._foreach_copy_(targets, fake(torch.cat(sources)).split([len(p) for p in sources]))

    @torch.no_grad()
    def update(self) -> None:
        """Gradients into masters, masters into the working copy; gradients back to zero."""
        load = torch.stack([b.grad for b in self.biases])
        self.loads.lerp_(load / load.sum(1, keepdim=True).clamp(min=1e-9), 0.05)
        change = self.balance_rate * (1 - self.loads * load.shape[1]).clamp(-1, 1)
        torch._foreach_add_(self.biases, list((change - change.mean(1, keepdim=True)).unbind()))
        nn.utils.clip_grad_norm_([p for g in self.adam.param_groups for p in g["params"]], 1.0, foreach=True)
        self.muon.step(self.muon_rate)
        self.adam.step()
        torch._foreach_zero_(self.gradients)
        self.round()

    def set_rates(self, pace: float, progress: float) -> None:
        """pace: 0..1, times the highest rates; progress: 0..1, the part of the schedule that is over."""
        self.muon_rate.fill_(MUON_RATE * pace)
        for group in self.adam.param_groups:
            group["lr"].fill_(ADAM_RATES[group["name"]] * pace)
        self.balance_rate.fill_(1e-3 if progress < 0.97 else 0.0)
        self.picture_weight.fill_(0.1 * max(0.0, 1 - progress / 0.6))

    def record(self, first_batches: dict[str, dict[str, Tensor]]) -> None:
        """Compile everything and record each kind's work, and the update, as a CUDA graph.

        The model is small: 4,300 kernels a batch take longer to launch than to run, unless a graph launches them all.
        """
        torch._dynamo.config.recompile_limit = 64
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

        def recorded(work: Callable[[], None]) -> Callable[[], None]:
            started = monotonic()
            torch.cuda.synchronize()
            with torch.cuda.stream(side):  # before recording: compile, and let libraries allocate
                for _ in range(2):
                    work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # the loader's thread goes on
                work()
            self.log(f"compiled and recorded {work.__qualname__} in {monotonic() - started:.0f} s")
            return graph.replay

        for name, kind in self.kinds.items():
            kind.load(first_batches[name])
            kind.run = recorded(kind.compute)
        torch._foreach_zero_(self.gradients)
        self.set_rates(0.0, 1.0)  # trial updates change nothing
        self.update = recorded(self.update)


def train(
    trainer: Trainer, streams: dict[str, Iterator], warmup: int, seconds: float, start: float = 0.0
) -> list[dict]:
    """Steps until the time is up. Rates: warm-up, constant to 45 % of the schedule, then linear to zero.

    start: where in the schedule to begin, 0..1. Returns the losses on the way.
    """
    history: list[dict] = []
    on_gpu = trainer.device.type == "cuda"
    began, step, progress, noted = monotonic(), 0, start, -math.inf
    while progress < 1:
        trainer.set_rates(min(1.0, (step + 1) / warmup, (1 - progress) / 0.55), progress)
        for name, kind in trainer.kinds.items():
            if name == "short" or step % LONG_EVERY == 0:
                kind.load(next(streams[name]))
                kind.run()
        trainer.update()
        step += 1
        if step % 10 == 0 or not on_gpu:
            if on_gpu:
                torch.cuda.synchronize()  # else the clock would run ahead of the work
            elapsed = monotonic() - began
            progress = start + (1 - start) * elapsed / seconds
            if elapsed - noted > seconds / 40 or progress >= 1:
                noted = elapsed
                parts = {name: [round(x, 4) for x in kind.parts.tolist()] for name, kind in trainer.kinds.items()}
                history.append({"step": step, "seconds": round(elapsed, 1), **parts})
                shown = "; ".join(f"{name} {' '.join(f'{x:.3f}' for x in values)}" for name, values in parts.items())
                load = trainer.loads * trainer.loads.shape[1]
                trainer.log(f"{elapsed:6.1f} s  step {step:5}  loss {shown}; load {load.min():.2f}-{load.max():.2f}")
    return history


def main(
    out: str | Path,
    minutes: float = 8.0,
    device: str | None = None,
    seed: int = 0,
    preset_name: str | None = None,
    resume: str | Path | None = None,
    log: Callable[[str], None] = print,
) -> list[dict]:
    """Train; write the checkpoint to `out` and, with unquantised experts, to `out`-bf16. Returns the losses on the way.

    The log's losses are those of answers, of the text around them, and of the coloured shapes in image tiles.

    Args:
        minutes: of training; starting, compiling and writing come on top (two to three minutes on a GPU).
        device: cuda or cpu; None takes a GPU if there is one.
        preset_name: nano or mini; None takes nano on a GPU and mini on a CPU.
        resume: an `out`-bf16 of before to go on from, with lower rates; give another seed, for other data.

    Raises:
        InputError: minutes that are not positive, an unknown preset, a device that is not there, a bad checkpoint.
    """
    if not minutes > 0:
        raise InputError(f"minutes: {minutes}, expected more than 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda': no GPU is visible to torch, expected 'cpu' here")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu, began, out = place.type == "cuda", monotonic(), Path(out)
    plan = preset(preset_name or ("nano" if on_gpu else "mini"))
    encoder = rows.Encoder(Tokenizer.from_pretrained(SHIPPED))
    text = replace(plan.config.text, eos_token_id=encoder.markers[END_SAMPLING])
    plan = replace(plan, config=replace(plan.config, text=text, image_token_id=encoder.image_id))
    torch.manual_seed(seed)
    threads = torch.get_num_threads()
    if not on_gpu:  # operations this small gain little from more threads, and lose much where cores are shared
        torch.set_num_threads(1)

    makers = {"short": rows.short_batch, "long": rows.long_batch}
    streams = {
        name: iter(
            torch.utils.data.DataLoader(
                Stream(makers[name], encoder, shape, seed), batch_size=None, num_workers=plan.workers[name],
                prefetch_factor=3, pin_memory=on_gpu,
            )
        )
        for name, shape in plan.shapes.items()
    }  # fmt: skip
    trainer = Trainer(plan, place, log, {"dynamic": False, "fullgraph": True} if on_gpu else None)
    if resume is not None:
        trainer.master.load_state_dict(checkpoint.load(resume).state_dict())
        trainer.round()
    if on_gpu:
        trainer.record({name: next(stream) for name, stream in streams.items()})
    log(f"ready after {monotonic() - began:.0f} s")

    history = train(trainer, streams, plan.warmup, 60 * minutes, RESUME_AT if resume else 0.0)
    torch.set_num_threads(threads)
    for folder, experts in ((out, "nvfp4+mxfp8"), (out.with_name(f"{out.resolve().name}-bf16"), "bf16")):
        checkpoint.save(trainer.master, folder, experts=experts)
        shutil.copy(SHIPPED / "tokenizer.json", folder)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    record: dict[str, Any] = {"seed": seed, "minutes": minutes, "device": where, "history": history}
    with whole_file(out / "training.json") as partial:
        partial.write_text(json.dumps(record) + "\n")
    log(f"written to {out} after {monotonic() - began:.0f} s")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train nano.")
    parser.add_argument("out")
    options = {"minutes": float, "device": str, "seed": int, "preset-name": str, "resume": str}
    for option, kind in options.items():
        parser.add_argument(f"--{option}", type=kind, default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
