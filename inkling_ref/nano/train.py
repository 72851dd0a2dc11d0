r"""Train nano: a plain loop around the package's own model, on one GPU or, smaller, on a CPU.

    python -m inkling_ref.nano.train OUT --minutes 8         # or: inkling-ref train-nano OUT --minutes 8

**Two copies of the weights.** `master` is an `Inkling` in float32; the optimisers change it. `model` is an `Inkling`
in bfloat16, rounded from the master before every step, its experts rounded all the way to the values that NVFP4 and
MXFP8 can store; the forward and backward pass run on it. Its gradients are applied to the masters as if there had
been no rounding (a straight-through estimator):

$$ W \leftarrow W - \eta \; \mathrm{opt}\Big( \frac{\partial \, \mathrm{loss}}{\partial Q} \Big|_{Q = \mathrm{round}(W)} \Big) $$

So training sees at every step exactly what the shipped file will hold.

**Operations.** The reference functions are made to be read and to decode; they choose experts one at a time and walk
over blocks of queries. `training_backend` replaces four of them by equal ones of fixed shapes, which a compiler can
fuse and a CUDA graph can record: every expert computes every token (E = 16 is few), sliding attention works on chunks
of W queries against 2W keys, full attention on all T x T scores. tests/test_nano_train.py holds them to the reference.

**Batches.** Two shapes. Short rows every step: pictures, stories, sums, talk. Long rows every third step: retrieval.
Loss: cross-entropy, weight 1 on answers and 0.1 on the text around them.

**Optimisers.** Muon for matrices: the momentum G of a matrix is replaced by the nearest orthogonal matrix U V^T (of its
singular value decomposition U S V^T), found by five Newton-Schulz steps. AdamW for all else. The router's correction
bias is no parameter of the loss: it moves towards even loads,

$$ b_e \leftarrow b_e + 10^{-3} \, \mathrm{clamp}(1 - E \, \mathrm{load}_e, -1, 1) $$
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checkpoint
from ..backends import Backend
from ..cache import Step
from ..chat import END_SAMPLING, Tokenizer
from ..config import InklingConfig
from ..errors import InputError
from ..model import Inkling
from ..quantization import fake_mxfp8_weight, fake_nvfp4_weight
from ..residual import rms, rms_norm, wide
from ..vision import LEVEL_CENTRE, LEVEL_SCALE, PAD_LEVEL
from . import rows
from .rows import ANSWER, TEXT
from .tasks import TASKS
from .world.scenes import COLOURS, SHAPES

RESUME_AT = 0.6  # of the schedule: resumed weights are past the high rates
SHIPPED = Path(__file__).parent.parent / "data" / "nano"
N_COLOURS, N_SHAPES = len(COLOURS), len(SHAPES)

# ---------------------------------------------------------------- the operations, in fixed shapes


def mix_and_norm(
    sources: Float[Tensor, "B T n D"],
    queries: Float[Tensor, "q D"] | None,
    norm_weights: list[Tensor],
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """As `residual.mix_and_norm`, written out over the few sources: one pass over rows of D, which fuses."""
    if queries is None:
        return [rms_norm(sources[:, :, -1], w, eps).to(dtype) for w in norm_weights]
    normed = [rms(s, eps) for s in sources.unbind(dim=2)]
    outputs = []
    D = queries.shape[-1]
    for query, weight in zip((wide(queries) / math.sqrt(D)).view(-1, D).unbind(), norm_weights, strict=True):
        scores = [(x * query).sum(-1, keepdim=True) for x in normed]
        top = scores[0].detach()
        for s in scores[1:]:
            top = torch.maximum(top, s.detach())
        shares = [(s - top).exp() for s in scores]
        mixture = sum(x * share for x, share in zip(normed, shares, strict=True)) / sum(shares)
        outputs.append(rms_norm(mixture, weight, eps).to(dtype))
    return outputs


def convolve(u: Tensor, taps: Iterable[Tensor], scale: float) -> Tensor:
    """(sum over taps, the oldest first, of tap times input, + input) scale; u [B, K - 1 + T, ...] with its history."""
    taps, wide_u = list(taps), wide(u)
    T = u.shape[1] - len(taps) + 1
    y = wide_u[:, -T:]
    for j, tap in enumerate(taps):
        y = y + wide_u[:, j : j + T] * tap
    return (y * scale).to(u.dtype)


def short_conv(u, weight, document_position=None):
    """As `short_conv.short_conv`, as a sum of shifted products."""
    taps = wide(weight)[:, 0].unbind(-1)
    return convolve(u, taps, 1 / math.sqrt(len(taps) + 1))


def dynamic_short_conv(u, dynamic_taps, static, document_position=None):
    """As `short_conv.dynamic_short_conv`, head by head."""
    K, G = static.shape[0], dynamic_taps.shape[2]
    taps = wide(static).view(K, G, -1)[:, None, None] + wide(dynamic_taps).permute(3, 0, 1, 2)[..., None]
    return convolve(u.unflatten(-1, (G, -1)), taps.flip(0).unbind(), 1 / math.sqrt(2 * K + 1)).flatten(-2)


def band(values: Float[Tensor, "... t x"], first: int, columns: int) -> Float[Tensor, "... t columns"]:
    """Row i holds its x values in columns first + i, first + i + 1, ...; what falls outside the row is cut off.

    By padding rows to columns + 1 and reading them again with columns a row: each row moves one place further, and
    no index is computed. What is cut off lands in columns that the caller's mask hides.
    """
    rows, x = values.shape[-2:]
    skip = 0
    if first < 0:  # start one row higher, and leave that row's beginning out
        skip, first = columns, first + columns
    flat = F.pad(values, (first, columns + 1 - x - first)).flatten(-2)
    return flat[..., skip : skip + rows * columns].unflatten(-1, (rows, columns))


def attend(q, k, v, r, profiles, sink, gate, offsets, window=None, first_keys=None, document_ids=None):
    """As `attention.attend`, for whole sequences without a cache or packed documents."""
    assert not any(offsets) and document_ids is None
    B, T, H, d = q.shape
    G, X = k.shape[1], profiles.shape[1]
    rows = T if window is None else window  # queries that share one set of keys
    chunks = T // rows
    assert chunks * rows == T, f"T = {T} must be a multiple of the window {window}"

    def by_chunk(u: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, G, chunks, H / G, rows, ...]
        u = u.reshape(B, chunks, rows, G, H // G, *u.shape[3:])
        return u.permute(0, 3, 1, 4, 2, *range(5, u.dim()))

    def with_previous(u: Tensor) -> Tensor:  # [B, G, T, d] -> [B, G, chunks, keys, d]
        own = u.unflatten(2, (chunks, rows))
        if window is None:
            return own
        return torch.cat([F.pad(u, (0, 0, rows, 0))[:, :, :T].unflatten(2, (chunks, rows)), own], dim=3)

    k, v = with_previous(k), with_previous(v)
    keys = k.shape[3]
    distance = torch.arange(rows, device=q.device)[:, None] + (keys - rows) - torch.arange(keys, device=q.device)
    visible = distance >= 0
    if window is not None:
        chunk = torch.arange(chunks, device=q.device)[:, None, None, None]
        own = torch.arange(keys, device=q.device) >= rows
        visible = visible & (distance < window) & ((chunk > 0) | own)
    scores = (by_chunk(q).flatten(3, 4) @ k.transpose(-1, -2)).unflatten(3, (H // G, rows)) / math.sqrt(d)
    # Distance x stands in column i + keys - rows - x: the profiles run backwards.
    bias = band(by_chunk(r) @ profiles.flip(-1), keys - rows - X + 1, keys)
    scores = (wide(scores) + wide(bias)).masked_fill(~visible, -math.inf)
    z = wide(by_chunk(sink))[..., None]
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), z.detach())
    e = (scores - top).exp()
    p = (e / (e.sum(-1, keepdim=True) + (z - top).exp())).to(q.dtype)
    o = (p.flatten(3, 4) @ v).unflatten(3, (H // G, rows)).permute(0, 2, 4, 1, 3, 5).reshape(B, T, H * d)
    return (wide(o) * wide(gate).sigmoid()).to(o.dtype)


class LoadAsGradient(torch.autograd.Function):
    """Passes the scores on; the "gradient" of the correction bias is the share of tokens each expert received.

    The bias has no gradient of its own, and its slot carries the load to the optimiser's side, summed over the
    batches of a step like any gradient.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids, bias)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ids, bias = ctx.saved_tensors
        chosen = ids[..., None] == torch.arange(bias.shape[0], device=ids.device)
        return gradient, chosen.to(bias.dtype).mean((0, 1)), None


def route(h, weight, bias, k, scale, normalize=True):
    """As `moe.route`, but for the order of equal scores."""
    scores = F.linear(wide(h), wide(weight)).sigmoid()
    ids = (scores.detach() + wide(bias.detach())).topk(k, dim=-1).indices
    chosen = LoadAsGradient.apply(scores.gather(-1, ids), bias, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale, ids


def experts(h, weights, ids, w13, w2, gate_cap, up_cap, quantize=None):
    """As `moe.experts`, but every expert computes every token, with weight 0 where it was not chosen."""
    E, _, D = w13.weight.shape
    # Gate and up rows apart: interleaved columns of the activation would be read at half speed.
    rows = w13.weight.unflatten(1, (-1, 2)).permute(2, 0, 1, 3).reshape(-1, D)
    g, u = (wide(x).unflatten(-1, (E, -1)) for x in F.linear(h, rows).chunk(2, dim=-1))
    share = (weights[..., None] * (ids[..., None] == torch.arange(E, device=ids.device))).sum(1)  # [N, E]

    def cap(x: Tensor, c: float) -> Tensor:
        return (2 * torch.sigmoid(x * (2 / c)) - 1) * c  # tanh, but from an instruction that GPUs have

    a = (cap(g, gate_cap) * g.sigmoid() * cap(u, up_cap) * share[..., None]).to(h.dtype)
    return a.flatten(1) @ w2.weight.transpose(1, 2).reshape(-1, D)


def training_backend(compiled: Callable = lambda f: f) -> Backend:
    """Operations for training; `compiled` wraps each of them."""
    mix = compiled(mix_and_norm)

    def flat_mix(sources: Tensor, *args: Any) -> list[Tensor]:  # one compiled shape for both kinds of batches
        return [y.view(*sources.shape[:2], -1) for y in mix(sources.flatten(0, 1)[None], *args)]

    return Backend(flat_mix, short_conv, dynamic_short_conv, attend, compiled(route), compiled(experts))


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class Shape:
    """The fixed shape of one kind of batches."""

    rows: int
    length: int
    pictures: int
    tiles: int  # of one picture, at most


def to_tensors(batch: Any, shape: Shape, image_token_id: int) -> dict[str, Tensor]:
    """A `rows.Batch` in fixed shapes, but for the tiles, of which only the real ones travel.

    `index` names the tile in each place of each picture, `slots` the token it becomes (one past the end: none).
    """
    ids = np.asarray(batch.ids, np.int32)
    B, T = ids.shape
    labels, worth = np.zeros_like(ids), np.zeros((B, T), np.uint8)
    labels[:, :-1], worth[:, :-1] = ids[:, 1:], batch.targets[:, 1:]
    index = np.zeros((shape.pictures, shape.tiles), np.int32)
    slots = np.full((shape.pictures, shape.tiles), shape.rows * shape.length, np.int64)
    grids = np.zeros((shape.pictures, 2), np.int64)
    grids[: len(batch.grids)] = batch.grids
    places, start = np.flatnonzero(ids == image_token_id), 0
    for i, n in enumerate(grids.prod(1)):
        index[i, :n] = np.arange(start, start + n)
        slots[i, :n] = places[start : start + n]
        start += n
    assert start == len(places) == len(batch.tiles)
    kinds = np.zeros((len(batch.tiles), N_COLOURS * N_SHAPES), np.uint8)
    tile, colour, form = np.asarray(batch.objects, np.int64).reshape(-1, 3).T
    kinds[tile, colour * N_SHAPES + form] = 1
    arrays = {"ids": ids, "labels": labels, "worth": worth, "index": index, "slots": slots, "grids": grids}
    arrays |= {"tiles": batch.tiles, "extents": batch.extents, "kinds": kinds}
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}


class Stream(torch.utils.data.IterableDataset):
    """Endless batches; every worker has its own seeds."""

    def __init__(self, make: Callable, encoder: Any, shape: Shape, image_token_id: int, seed: int) -> None:
        self.make, self.encoder, self.shape, self.image_token_id, self.seed = make, encoder, shape, image_token_id, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            batch = self.make(self.seed * 1_000_000 + number, self.encoder, self.shape.rows, self.shape.length)
            yield to_tensors(batch, self.shape, self.image_token_id)
            number += count


def pixels(tiles: Tensor, extents: Tensor) -> Tensor:
    """Levels to what the encoder reads; outside the picture the level is -1."""
    side = torch.arange(tiles.shape[-2], device=tiles.device)
    inside = (side[:, None] < extents[..., 0, None, None]) & (side < extents[..., 1, None, None])
    return (torch.where(inside[..., None], tiles.float(), PAD_LEVEL) - LEVEL_CENTRE) / LEVEL_SCALE


# ---------------------------------------------------------------- optimisers


def orthogonal(g: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
    """Each matrix's singular values brought to about 1, by five steps of an odd polynomial X -> aX + (bA + cA^2)X,
    A = X X^T. Its coefficients make small values grow fast and leave large ones between 0.7 and 1.2: good enough for
    a direction, and only matrix products."""
    x = g / (torch.linalg.matrix_norm(g, keepdim=True) + 1e-7)
    x = x.bfloat16() if g.is_cuda else x
    if tall := g.shape[-2] > g.shape[-1]:  # the Gram matrix of the shorter side
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Momentum, made orthogonal. Matrices of one shape are stacked (experts are stacks already): a few products in all.

    Takes over the parameters' storage: `p.data` and `p.grad` become views of the stacks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        by_shape: dict[tuple, list[nn.Parameter]] = {}
        for p in parameters:
            by_shape.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.stacks = []
        for shape, members in by_shape.items():
            weights = torch.cat([p.data.view(-1, *shape) for p in members])
            gradients = torch.zeros_like(weights)
            counts = [p.numel() // (shape[0] * shape[1]) for p in members]
            for p, w, g in zip(members, weights.split(counts), gradients.split(counts), strict=True):
                p.data, p.grad = w.view(p.shape), g.view(p.shape)
            self.stacks.append((weights, gradients, torch.zeros_like(weights)))

    def step(self, rate: Tensor) -> None:
        """rate: the learning rate, on the device."""
        for weights, gradients, velocity in self.stacks:
            velocity.lerp_(gradients, 1 - self.momentum)
            direction = orthogonal(gradients.lerp(velocity, self.momentum))
            rows, columns = weights.shape[-2:]
            weights.mul_(1 - rate * self.decay).sub_(direction * (rate * math.sqrt(max(1, rows / columns))))


def is_matrix(name: str) -> bool:
    """Whether Muon trains it: the big projections, the experts, and the encoder's linear maps."""
    text = ("wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "gate_attn", "w13", "w2")
    vision = ("patch_embedding", "q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj", "proj_in", "proj_out")
    parts = name.removesuffix("_weight").removesuffix(".weight").split(".")
    return not name.endswith("bias") and parts[-1] in text + vision


def initialise(model: Inkling) -> None:
    """Starting values. No output projection starts at zero: a zero source of a residual mixture has a gradient a
    thousand times too large, since the mixture divides by the source's RMS."""
    for name, p in model.named_parameters():
        if is_matrix(name) or name.endswith("attn_sink_proj.weight"):
            nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        elif name.startswith("visual.") and name.endswith("bias"):
            nn.init.zeros_(p)
    nn.init.normal_(model.visual.backbone.embeddings.position_embedding, std=0.3)
    llm = model.llm
    nn.init.normal_(llm.embed.weight, std=0.3)
    nn.init.normal_(llm.unembed.weight, std=0.02)
    for layer in llm.layers:
        nn.init.normal_(layer.attn.rel_logits_proj.proj, std=0.05)
        nn.init.normal_(layer.mlp.gate.weight, std=0.5 * layer.mlp.gate.weight.shape[1] ** -0.5)
        for conv, std in ((layer.attn_sconv, 0.15), (layer.mlp_sconv, 0.15)):
            nn.init.normal_(conv.weight, std=std)
        for conv in (layer.attn.k_sconv, layer.attn.v_sconv):
            nn.init.normal_(conv.weight if layer.is_sliding else conv.static_w, std=0.5)
            if not layer.is_sliding:
                nn.init.normal_(conv.weight_proj, std=0.2 * conv.weight_proj.shape[1] ** -0.5)


# ---------------------------------------------------------------- one step


def embed(llm: nn.Module, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """As `llm.embed_tokens`, as a product with one-hot rows: its backward is a product too, not a sort."""
    weight = llm.embed.weight
    one_hot = (ids[..., None] == torch.arange(weight.shape[0], device=ids.device)).to(weight.dtype)
    e = one_hot @ weight
    return rms_norm(e, llm.embed_norm.weight, llm.config.rms_norm_eps).to(e.dtype)


def losses(llm: nn.Module, hidden: Float[Tensor, "N D"], labels: Int[Tensor, " N"], worth: Tensor) -> tuple:
    """The loss; [answers' loss, texts' loss]; and whether each token is what greedy decoding would choose."""
    logits = llm.logits(hidden)
    each = F.cross_entropy(logits, labels, reduction="none")
    answer, text = worth == ANSWER, worth == TEXT
    weight = answer + 0.1 * text
    loss = (each * weight).sum() / weight.sum()
    parts = [(each.detach() * m).sum() / m.sum().clamp(min=1) for m in (answer, text)]
    return loss, torch.stack(parts), (logits.argmax(-1) == labels) | ~answer


class Kind:
    """One kind of batches: its inputs at fixed addresses, and forward + backward from them into the gradients."""

    def __init__(self, trainer: "Trainer", shape: Shape, weight: float) -> None:
        self.trainer, self.shape, self.weight = trainer, shape, weight
        places = shape.pictures * shape.tiles
        side = trainer.model.config.vision.tile_size
        sizes = {
            "ids": ((shape.rows, shape.length), torch.int32),
            "labels": ((shape.rows, shape.length), torch.int32),
            "worth": ((shape.rows, shape.length), torch.uint8),
            "index": ((shape.pictures, shape.tiles), torch.int32),
            "slots": ((shape.pictures, shape.tiles), torch.int64),
            "grids": ((shape.pictures, 2), torch.int64),
            "tiles": ((places, side, side, 3), torch.uint8),
            "extents": ((places, 2), torch.uint8),
            "kinds": ((places, N_COLOURS * N_SHAPES), torch.uint8),
        }
        self.inputs = {name: torch.zeros(s, dtype=t, device=trainer.device) for name, (s, t) in sizes.items()}
        self.step = Step([0] * shape.rows, torch.arange(shape.length, device=trainer.device)[None])
        self.parts = torch.zeros(3, device=trainer.device)
        self.exact = torch.zeros(shape.rows, dtype=torch.bool, device=trainer.device)
        self.run = self.compute

    def load(self, batch: dict[str, Tensor]) -> None:
        for name, tensor in batch.items():
            self.inputs[name][: len(tensor)].copy_(tensor, non_blocking=True)

    def compute(self) -> None:
        """Adds the gradients of the batch in `inputs`; leaves `parts` [answers, texts, pictures] and `exact` [rows]."""
        t, x = self.trainer, self.inputs
        model, D = t.model, t.model.config.text.hidden_size
        index = x["index"]
        pictures = pixels(x["tiles"][index], x["extents"][index]).to(model.dtype)
        features = model.visual.encode(pictures, x["grids"], padded=True)

        e = embed(model.llm, x["ids"])
        e = torch.cat([e.view(-1, D), e.new_zeros(1, D)])  # the spare last row takes what belongs nowhere
        e = e.index_copy(0, x["slots"].flatten(), features.flatten(0, 1).to(e.dtype))[:-1].view(*x["ids"].shape, D)
        hidden = model.llm(e, self.step)
        loss, parts, correct = t.losses(
            model.llm, hidden.flatten(0, 1), x["labels"].flatten().long(), x["worth"].flatten()
        )

        # Which colours and shapes have their centre in this tile? Pictures learn much faster when told directly.
        real = (x["slots"] < x["ids"].numel()).float()[..., None]
        seen = F.binary_cross_entropy_with_logits(
            t.picture_head(features.float()), x["kinds"][index].float(), weight=real, reduction="sum",
            pos_weight=t.pos_weight,
        ) / real.sum().clamp(min=1)  # fmt: skip
        gradients = torch.autograd.grad(self.weight * (loss + t.picture_weight * seen), t.working)
        torch._foreach_add_(t.gradients, gradients)
        self.parts.copy_(torch.cat([parts, seen.detach()[None]]))
        self.exact.copy_(correct.view(x["ids"].shape).all(1))


class Trainer:
    """Both copies of the weights, the optimisers, and one training step; on a GPU, as CUDA graphs."""

    def __init__(self, config: InklingConfig, device: torch.device, shapes: dict[str, Shape], log: Callable, compile_anyway=False) -> None:
        self.device, fast = device, device.type == "cuda" or compile_anyway
        compiled = (lambda f: torch.compile(f, dynamic=False, fullgraph=True)) if fast else (lambda f: f)
        self.master = Inkling(config)
        initialise(self.master)
        self.master.to(device)
        # On a CPU the reference is as fast: it computes four experts a token, not all.
        self.model = Inkling(config, training_backend(compiled) if fast else Backend(route=route)).to(device)
        self.model.cast(torch.bfloat16 if fast else torch.float32)
        self.losses = compiled(losses)
        self.picture_head = nn.Linear(config.text.hidden_size, N_COLOURS * N_SHAPES).to(device)  # dropped at the end
        self.picture_weight, self.pos_weight = (torch.full((), v, device=device) for v in (1.0, 5.0))
        if fast:  # a few small compiled pieces, shared by all layers of a kind: compiles in two minutes, not twenty
            layers = [m for layer in self.model.llm.layers for m in (layer.attn, layer.attn_sconv, layer.mlp_sconv)]
            for module in (*layers, *self.model.visual.backbone.layers):
                module.compile(dynamic=False, fullgraph=True)

        masters = dict(self.master.named_parameters())
        balanced = [n for n in masters if n.endswith("mlp.gate.bias")]
        matrices = [n for n in masters if is_matrix(n)]
        others = [n for n in masters if n not in {*balanced, *matrices}]
        self.muon = Muon(masters[n] for n in matrices)
        self.biases = [masters[n] for n in balanced]
        self.loads = torch.full((len(balanced), config.text.n_routed_experts), 1 / config.text.n_routed_experts)
        self.loads = self.loads.to(device)

        def rate(value: float) -> Tensor:
            return torch.full((), value, device=device)

        self.base_rates = {"embed": 4.5e-3, "queries": 6e-3, "rest": 3e-3}
        groups: dict[str, list] = {"embed": [], "queries": [], "rest": list(self.picture_head.parameters())}
        for n in others:
            kind = "embed" if "embed.weight" in n and "llm." in n else "queries" if "attn_res" in n else "rest"
            groups[kind].append(masters[n])
        self.adam = torch.optim.AdamW(
            [{"params": ps, "lr": rate(0.0), "name": name} for name, ps in groups.items()],
            lr=rate(0.0), betas=(0.9, 0.98), weight_decay=0.0, fused=True, capturable=device.type=='cuda',
        )  # fmt: skip
        self.muon_rate, self.balance_rate = rate(0.0), rate(0.0)

        working = dict(self.model.named_parameters())
        for p in self.model.parameters():
            p.requires_grad_(True)  # the correction bias too: see LoadAsGradient
        names = [*masters]
        self.working = [working[n] for n in names] + list(self.picture_head.parameters())
        learning = [masters[n] for n in names] + list(self.picture_head.parameters())
        for p in learning:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        self.gradients = [p.grad for p in learning]
        self.plain = [(working[n], masters[n]) for n in names if ".experts." not in n]
        self.round()

        weights = {"short": 1.0, "long": 0.6}
        self.kinds = {name: Kind(self, shape, weights[name]) for name, shape in shapes.items()}
        self.log = log

    @torch.no_grad()
    def round(self, quantised: bool = True) -> None:
        """The working copy, from the masters: experts to storable values, the rest to the working dtype."""
        targets, sources = zip(*self.plain, strict=True)
        torch._foreach_copy_(targets, sources)
        keep = (lambda w: w) if not quantised else None
        layers = list(zip(self.model.llm.layers, self.master.llm.layers, strict=True))
        first = len(layers) * 5 // 6  # as checkpoint.save divides them
        for members, fake in ((layers[:first], fake_nvfp4_weight), (layers[first:], fake_mxfp8_weight)):
            for name in checkpoint.MATRICES:
                pairs = [[getattr(layer.mlp.experts, name) for layer in pair] for pair in members]
                targets, sources = zip(*pairs, strict=True)
                torch._foreach_copy_(targets, (keep or fake)(torch.cat(sources)).split([len(p) for p in sources]))

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
        """pace: 0..1, the schedule; progress: 0..1, the time spent."""
        self.muon_rate.fill_(0.015 * pace)
        for group in self.adam.param_groups:
            group["lr"].fill_(self.base_rates[group["name"]] * pace)
        self.balance_rate.fill_(1e-3 if progress < 0.97 else 0.0)
        self.picture_weight.fill_(0.1 * max(0.0, 1 - progress / 0.6))

    def record(self, first_batches: dict[str, dict[str, Tensor]]) -> None:
        """Compile everything and record each kind's work, and the update, as a CUDA graph.

        The model is small: 5,000 kernels a step take longer to launch than to run, unless a graph launches them all.
        """
        torch._dynamo.config.recompile_limit = 64
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        for name, kind in self.kinds.items():
            started = time.monotonic()
            kind.load(first_batches[name])
            with torch.cuda.stream(side):
                for _ in range(3):
                    kind.compute()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                kind.compute()
            kind.run = graph.replay
            self.log(f"compiled and recorded {name} batches in {time.monotonic() - started:.0f} s")
        torch._foreach_zero_(self.gradients)
        self.set_rates(0.0, 1.0)  # the trial runs change nothing
        with torch.cuda.stream(side):
            for _ in range(2):
                self.update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.update()
        self.update = graph.replay


# ---------------------------------------------------------------- presets


@dataclass(frozen=True)
class Preset:
    """What is trained, on which batches."""

    config: InklingConfig
    shapes: dict[str, Shape]
    workers: dict[str, int]
    warmup: int  # steps
    long_every: int = 3


def short_shape(count: int, length: int) -> Shape:
    """The bounds that rows.short_batch keeps."""
    return Shape(count, length, pictures=13 * count // 16, tiles=rows.SHORT_TILES)


def long_shape(count: int, length: int) -> Shape:
    """The bounds that rows.long_batch keeps."""
    return Shape(count, length, pictures=rows.max_long_pictures(count, length), tiles=rows.LONG_TILES)


def preset(name: str) -> Preset:
    """nano: the shipped model, for a GPU. mini: six of its layers and short rows only, for two minutes on a CPU.

    Raises:
        InputError: for another name.
    """
    config = InklingConfig.nano()
    if name == "nano":
        shapes = {"short": short_shape(256, 128), "long": long_shape(8, 4096)}
        return Preset(config, shapes, {"short": 11, "long": 4}, warmup=150)
    if name == "mini":
        text = replace(config.text, num_hidden_layers=6, layer_types=[], n_layers_per_attn_res_block=2)
        return Preset(replace(config, text=text), {"short": short_shape(8, 128)}, {"short": 1}, warmup=20)
    raise InputError(f"preset {name!r}: expected 'nano' or 'mini'")


# ---------------------------------------------------------------- the run


def evaluation_batches(name: str, examples: int, shapes: dict[str, Shape]) -> list[tuple]:
    """(kind, batch, number of examples in it) of one task's held-out examples; those that fit no shape are left out."""
    encoder = rows.Encoder(Tokenizer.from_pretrained(SHIPPED))
    pending: dict[str, list] = {kind: [] for kind in shapes}
    batches = []

    def flush(kind: str) -> None:
        if pending[kind]:
            batch = rows.collate(pending[kind], encoder, shapes[kind].length)
            batches.append((kind, to_tensors(batch, shapes[kind], encoder.image_id), len(pending[kind])))
            pending[kind] = []

    for example in TASKS[name].examples(examples):
        row = rows.encode(example.conversation, encoder)
        tiles = [math.prod(scene.grid) for scene in row.scenes]
        fits = (k for k, s in shapes.items() if len(row.ids) <= s.length and max(tiles, default=0) <= s.tiles)
        if kind := next(fits, None):
            waiting = pending[kind]
            pictures = sum(len(r.scenes) for r in waiting) + len(tiles)
            if len(waiting) == shapes[kind].rows or pictures > shapes[kind].pictures:
                flush(kind)
            pending[kind].append(row)
    for kind in shapes:
        flush(kind)
    return batches


def train(trainer: Trainer, streams: dict[str, Iterator], plan: Preset, seconds: float, start: float = 0.0) -> list[dict]:
    """Steps until the time is up. Rates: warm-up, constant to 45 % of the schedule, then linear to zero.

    start: where in the schedule to begin, 0..1.
    """
    history: list[dict] = []
    on_gpu = trainer.device.type == "cuda"
    started, step, progress, noted = time.monotonic(), 0, start, -1e9
    while progress < 1:
        trainer.set_rates(min(1.0, (step + 1) / plan.warmup, (1 - progress) / 0.55), progress)
        for name, kind in trainer.kinds.items():
            if name == "short" or step % plan.long_every == 0:
                kind.load(next(streams[name]))
                kind.run()
        trainer.update()
        step += 1
        if step % 10 == 0 or not on_gpu:
            if on_gpu:
                torch.cuda.synchronize()  # else the clock would run ahead of the work
            elapsed = time.monotonic() - started
            progress = start + (1 - start) * elapsed / seconds
            if elapsed - noted > max(1.0, seconds / 50) or progress >= 1:
                noted = elapsed
                parts = {name: [round(x, 4) for x in kind.parts.tolist()] for name, kind in trainer.kinds.items()}
                history.append({"step": step, "seconds": round(elapsed, 1), **parts})
                losses = ", ".join(f"{name} {' '.join(f'{x:.4f}' for x in values)}" for name, values in parts.items())
                load = trainer.loads * trainer.loads.shape[1]
                trainer.log(f"{elapsed:6.1f} s  step {step:5d}  {losses}  load {load.min():.2f}-{load.max():.2f}")
    return history


def evaluate(trainer: Trainer, batches: dict[str, list[tuple]]) -> dict[str, list]:
    """Task -> [share of exactly right answers, number of examples], by teacher forcing with the working copy.

    Every token of an answer is the most likely one, given the ones before: the same event as greedy decoding giving
    the answer. It runs the recorded graphs, whose gradients are thrown away: nothing else needs compiling.
    """
    result = {}
    for name, members in batches.items():
        right: list[bool] = []
        for kind, batch, n in members:
            trainer.kinds[kind].load(batch)
            trainer.kinds[kind].run()
            right += trainer.kinds[kind].exact[:n].tolist()
        result[name] = [round(sum(right) / max(len(right), 1), 4), len(right)]
    torch._foreach_zero_(trainer.gradients)
    return result


def main(
    out: str | Path,
    minutes: float = 8.0,
    device: str | None = None,
    seed: int = 0,
    preset_name: str | None = None,
    examples: int = 0,
    resume: str | Path | None = None,
    masters: str | Path | None = None,
    log: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, write the checkpoint to `out`, and (examples > 0) evaluate it by task. Returns what training.json holds.

    Args:
        minutes: of training; starting, compiling and writing come on top (two to three minutes on a GPU).
        device: cuda or cpu; None takes a GPU if there is one.
        preset_name: nano or mini; None takes nano on a GPU and mini on a CPU.
        examples: of each task, for the evaluation.
        resume, masters: master weights to start from, and where to write them at the end (safetensors).

    Raises:
        InputError: minutes that are not positive, an unknown preset, a device that is not there.
    """
    if not minutes > 0:
        raise InputError(f"minutes: {minutes}, expected more than 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda': no GPU is visible to torch, expected 'cpu' here")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu, began = place.type == "cuda", time.monotonic()
    plan = preset(preset_name or ("nano" if on_gpu else "mini"))
    tokenizer = Tokenizer.from_pretrained(SHIPPED)
    encoder = rows.Encoder(tokenizer)
    text = replace(plan.config.text, eos_token_id=tokenizer.marker_id(END_SAMPLING))
    config = replace(plan.config, text=text, image_token_id=encoder.image_id)
    torch.manual_seed(seed)

    makers = {"short": rows.short_batch, "long": rows.long_batch}
    streams = {
        name: iter(
            torch.utils.data.DataLoader(
                Stream(makers[name], encoder, shape, encoder.image_id, seed),
                batch_size=None, num_workers=plan.workers[name], prefetch_factor=3, pin_memory=on_gpu,
            )
        )
        for name, shape in plan.shapes.items()
    }  # fmt: skip
    batches = {}
    if examples:
        with multiprocessing.Pool(min(len(TASKS), os.cpu_count() or 1)) as pool:
            made = pool.starmap(evaluation_batches, [(name, examples, plan.shapes) for name in TASKS], chunksize=1)
        batches = dict(zip(TASKS, made, strict=True))

    trainer = Trainer(config, place, plan.shapes, log)
    if resume is not None:
        state = {k: v.to(place) for k, v in load_file(resume).items()}
        trainer.master.load_state_dict(state)
        trainer.round()
    if on_gpu:
        trainer.record({name: next(stream) for name, stream in streams.items()})
    log(f"ready after {time.monotonic() - began:.0f} s")

    history = train(trainer, streams, plan, 60 * minutes, RESUME_AT if resume else 0.0)
    checkpoint.save(trainer.master.cpu() if not on_gpu else trainer.master, out, experts="nvfp4+mxfp8")
    shutil.copy(SHIPPED / "tokenizer.json", out)
    if masters is not None:
        save_file({k: v.bfloat16() for k, v in trainer.master.state_dict().items()}, masters)
    record: dict[str, Any] = {"seed": seed, "minutes": minutes, "device": device_name(place), "history": history}
    log(f"written after {time.monotonic() - began:.0f} s")
    if examples:
        record["mixed"] = evaluate(trainer, batches)
        trainer.round(quantised=False)
        record["bf16"] = evaluate(trainer, batches)
        for name in batches:
            (mixed, n), (plain, _) = record["mixed"][name], record["bf16"][name]
            log(f"{name:16} n {n:5d}  bf16 {plain:.4f}  shipped {mixed:.4f}")
    (Path(out) / "training.json").write_text(json.dumps(record) + "\n")
    log(f"done after {time.monotonic() - began:.0f} s")
    return record


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train nano.")
    parser.add_argument("out")
    for option, kind in {"minutes": float, "device": str, "seed": int, "preset_name": str, "examples": int}.items():
        parser.add_argument(f"--{option.replace('_name', '')}", dest=option, type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--resume", default=argparse.SUPPRESS)
    parser.add_argument("--masters", default=argparse.SUPPRESS)
    main(**vars(parser.parse_args()))
