r"""All ranks of a world in one process, on one device: each computes in its turn, and what they exchange is real.

A rank is a thread that runs the code of a rank under torchrun, on a mesh of its own. One of them runs at a time, until
it comes to a collective; then the next one has its turn. The last to come does the collective for all. Nothing here
measures time.

**Sums.** Ranks' parts are added in their order, and each sum is rounded to their dtype, as NCCL's ring does it.

**A checked slice** (the command). A few layers with random weights, packed as released, as one model and as the shards
of all ranks, each a slice of the same weights. Of the same tokens, hidden states x of a prompt, of single tokens and of
a few at once, some of which are taken back:

$$ \mathrm{error} = \lVert x - x^\star \rVert \,/\, \lVert x^\star \rVert $$

where the exact ones are those of the reference on one device in float32. In float32 the ranks differ from it by the
order of their sums. In 16 bits they may be about as far from it as one device is, for every rank's part rounds once
more. Rounding also decides which expert is a token's last, and with random weights that decides everything after it;
so all others take the experts that the reference chose (weighted by scores of their own), and the share of tokens that
would have chosen other ones stands in a row of its own.

    python -m inkling_ref.parallel.in_turn --preset small --layers 4 --tp 8 --device cuda --backend triton
"""

import argparse
import gc
import json
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from ..backends import Backend, get_backend
from ..checkpoint import empty_model, layer_formats
from ..cli import INTERRUPTED
from ..config import FULL, SLIDING, InklingConfig
from ..decode_step import DecodeStep
from ..errors import InputError
from ..files import check_file, whole_file
from ..measure.bench.harness import relative_rms, typical_rms
from ..model import Inkling
from ..moe import Router
from ..quantization import dtype_name
from ..residual import wide
from .apply import Mesh, parallelize
from .collectives import CollectiveError, Group, Traffic
from .plan import Plan
from .synthetic import synthetic

Result = TypeVar("Result")


class Turns:
    """Whose turn it is, of `size` threads."""

    def __init__(self, size: int) -> None:
        self.batons = [threading.Semaphore(0) for _ in range(size)]
        self.waits = [""] * size  # for what a rank waits; "": for its turn alone
        self.running = set(range(size))
        self.error: BaseException | None = None  # the first; all end with it

    def wait(self, rank: int) -> None:
        self.batons[rank].acquire()
        if self.error is not None:
            raise CollectiveError("another rank has failed")

    def pass_on(self, rank: int) -> None:
        """To the next one that need not wait for others."""
        size = len(self.waits)
        order = [(rank + i) % size for i in range(1, size + 1)]
        able = [r for r in order if r in self.running and not self.waits[r]]
        if not able and self.running:
            where = ", ".join(f"rank {r} for {self.waits[r]}" for r in sorted(self.running))
            self.fail(CollectiveError(f"ranks wait for ever: {where}"))
            able = [r for r in order if r in self.running]
        if able:
            self.batons[able[0]].release()

    def fail(self, error: BaseException) -> None:
        self.error, self.waits = self.error or error, [""] * len(self.waits)


class TurnGroup(Group):
    """A group whose ranks are threads: the last to come to a collective does it for all."""

    def __init__(self, name: str, ranks: range, rank: int, traffic: Traffic, turns: Turns, posts: dict) -> None:
        """`ranks`: of the world; `rank`: this one. `posts`: of each group what its ranks have brought."""
        super().__init__(name, len(ranks), ranks.index(rank), traffic)
        self.ranks, self.turns, self.what = tuple(ranks), turns, ""
        self.posts: dict[int, tuple] = posts.setdefault((name, self.ranks), {})

    def _run(self, what: str, sent: int, device: torch.device, collective: Callable[[], object]) -> None:
        self.what = f"{what} over {self.name}"
        collective()
        self.traffic.add(self.what, sent)

    def _meet(self, out: Tensor, brought: Any, together: Callable[[Sequence[Tensor], Sequence], None]) -> None:
        turns, me = self.turns, self.ranks[self.rank]
        self.posts[self.rank] = self.what, out, brought
        if len(self.posts) < self.size:
            turns.waits[me] = self.what
            turns.pass_on(me)
            turns.wait(me)
            return
        whats, outs, all_brought = zip(*(self.posts[i] for i in range(self.size)), strict=True)
        self.posts.clear()
        if len(set(whats)) > 1:
            raise CollectiveError(f"{' and '.join(sorted(set(whats)))} at once, expected one collective of all ranks")
        together(outs, all_brought)
        for rank in self.ranks:
            turns.waits[rank] = ""

    def _gather(self, out: Tensor, x: Tensor) -> None:
        self._meet(out, x, lambda outs, xs: _copy([torch.cat(xs)] * len(outs), outs))

    def _reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        self._meet(out, x, lambda outs, xs: _copy(reduce(torch.add, xs).chunk(len(outs)), outs))

    def _sum(self, x: Tensor) -> None:
        self._meet(x, x, lambda outs, xs: _copy([reduce(torch.add, xs)] * len(outs), outs))

    def _exchange(self, out: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        parts = x.split(sent or len(x) // self.size)
        self._meet(out, parts, lambda outs, all_parts: _copy(map(torch.cat, zip(*all_parts, strict=True)), outs))


def _copy(made: Iterable[Tensor], outs: Sequence[Tensor]) -> None:
    for tensor, out in zip(made, outs, strict=True):
        out.copy_(tensor)


def in_turn(plan: Plan, run: Callable[[Mesh], Result]) -> list[Result]:
    """What `run` gives on every rank's mesh, in the order of ranks.

    Raises:
        CollectiveError: ranks that come to different collectives, or wait for one that has ended.
        Exception: of `run`, the first rank's that fails.
    """
    turns, posts, results = Turns(plan.world), {}, {}
    inference = torch.is_inference_mode_enabled()  # of this thread alone

    def work(rank: int) -> None:
        first, place = plan.tp * (rank // plan.tp), rank % plan.tp
        ranks = range(plan.world), range(first, first + plan.tp), range(place, plan.world, plan.tp)
        traffic = Traffic()
        groups = [
            TurnGroup(name, r, rank, traffic, turns, posts)
            for name, r in zip(("world", "tp", "dp"), ranks, strict=True)
        ]
        try:
            turns.wait(rank)
            with torch.inference_mode(inference):
                results[rank] = run(Mesh(plan, rank, *groups, traffic))
        except BaseException as error:
            turns.fail(error)
        finally:
            turns.running.discard(rank)
            turns.pass_on(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(plan.world)]
    for thread in threads:
        thread.start()
    turns.batons[0].release()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: all end at their next collective
        turns.fail(error)
        while turns.running:  # an interrupted join takes its thread for ended
            time.sleep(0.01)
        raise
    if turns.error is not None:
        raise turns.error
    return [results[rank] for rank in range(plan.world)]


def bound(model: Inkling, mesh: Mesh | None = None, backend: str | Backend = "torch") -> Inkling:
    """A model of the same tensors: a rank's part in another world, whose plan cuts weights alike, or (None) a whole.

    Raises:
        InputError: a plan that cuts them in another way.
    """
    other, _ = empty_model(model.config, model.device, model.dtype, backend)
    for layer, source in zip(other.llm.layers, model.llm.layers, strict=True):
        layer.mlp.experts.stored_format = source.mlp.experts.stored_format
    if mesh is not None:
        parallelize(other, mesh)
        if other.share.slices() != model.share.slices():
            raise InputError(f"rank {mesh.rank} of {mesh.plan}: other slices than those of {model.share.plan}")
    for name, module in model.named_modules():
        for tensors in ("_parameters", "_buffers"):
            held = getattr(other.get_submodule(name), tensors)
            held.clear()
            held.update(getattr(module, tensors))
    return other.requires_grad_(False).eval()


# ---------------------------------------------------------------- a checked slice

WHO = ("ranks", "single", "apart")
DECODED, VERIFIED = 4, 8  # steps of one token; tokens of a step
REJECTED = (3, 0, 7, 0)  # of every row, tokens that are taken back after it
CUT = {"sequence": True, "sequence_from": 16}
# Of a plan: by `step`, or by `layers`, where tokens may be sent to experts.
FORMS: dict[str, dict[str, Any]] = {
    "step": {},
    "step, cut": CUT,
    "layers": {},
    "layers, cut": CUT,
    "sent": {"exchange": "all_to_all"},
    "sent, cut": {"exchange": "all_to_all", **CUT},
}


def slice_config(preset: str, layers: int) -> InklingConfig:
    """`layers` of a preset, every second one full, two of them a block of the depth state; no image encoder."""
    text = getattr(InklingConfig, preset)().text
    types = [FULL if i % 2 else SLIDING for i in range(layers)]
    text = replace(text, num_hidden_layers=layers, layer_types=types, n_layers_per_attn_res_block=2)
    return InklingConfig(text, None)


class Routes:
    """Which experts the tokens of `ids` chose, of every layer [B, T, k]: recorded of one model, imposed on others."""

    def __init__(self, model: Inkling, ids: Int[Tensor, "B T"], chosen: list[Tensor] | None) -> None:
        """`chosen`: by another model; None records."""
        self.model, self.is_recorded, self.columns = model, chosen is None, slice(0)
        k, L = model.config.text.num_experts_per_tok, len(model.llm.layers)
        self.chosen = [ids.new_zeros(*ids.shape, k) for _ in range(L)] if chosen is None else chosen
        self.seen = self.others = 0  # tokens, and those that would have chosen other experts
        self.hooks = [
            layer.mlp.gate.register_forward_hook(partial(self._hook, all_ids))
            for layer, all_ids in zip(model.llm.layers, self.chosen, strict=True)
        ]

    def end(self) -> None:
        """The model chooses again."""
        for hook in self.hooks:
            hook.remove()

    def _hook(self, chosen: Int[Tensor, "B T k"], gate: Router, inputs: tuple, outputs: tuple) -> tuple | None:
        (h,), (_, ids) = inputs, outputs
        if self.is_recorded:
            chosen[:, self.columns] = ids.view(len(chosen), -1, ids.shape[-1])
            return None
        places = self._places(len(chosen)).to(ids.device)
        imposed = chosen[:, self.columns].flatten(0, 1)[places.clamp(min=0)]
        is_other = (ids.sort().values != imposed.sort().values).any(dim=-1)
        self.seen, self.others = self.seen + (places >= 0).sum(), self.others + (is_other & (places >= 0)).sum()
        scores = F.linear(wide(h), wide(gate.weight)).sigmoid().gather(-1, imposed)
        return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) * gate.scale, imposed

    def _places(self, B: int) -> Int[Tensor, " N"]:
        """Which of this call's tokens a rank routes, -1 for padding."""
        T = self.columns.stop - self.columns.start
        places = torch.arange(B * T).view(B, T)
        if not hasattr(self.model, "share"):
            return places.flatten()
        current, sends = self.model.current, self.model.mesh.plan.exchange == "all_to_all"
        tp, rank = current.tp.size, current.tp.rank
        if current.T is None:
            return places.flatten().tensor_split(tp)[rank] if sends else places.flatten()
        places = F.pad(places, (0, current.chunk * tp - T), value=-1).chunk(tp, dim=1)[rank].flatten()
        return places[places >= 0] if sends else places


class Called:
    """A model that reads columns of `ids`, one call after the other."""

    def __init__(self, model: Inkling, ids: Int[Tensor, "B T"], chosen: list[Tensor] | None) -> None:
        self.model, self.ids, self.routes = model, ids, Routes(model, ids, chosen)
        self.single, self.several = ids.shape[1] - DECODED - 2 * VERIFIED, ids.shape[1] - 2 * VERIFIED

    def read(self, call: Callable, first: int, stop: int, *more: Any, **named: Any) -> Any:
        self.routes.columns = slice(first, stop)
        return call(self.ids[:, first:stop], *more, **named)

    @torch.inference_mode()
    def by_layers(self) -> dict[str, Tensor]:
        """Hidden states of a prompt, of tokens one by one and of a few at once; logits of the last ones."""
        end, read, cache = self.ids.shape[1], partial(self.read, self.model), self.model.new_cache(len(self.ids))
        prompt = read(0, self.single, cache=cache, logits_to_keep=1).hidden
        one = [read(i, i + 1, cache=cache, logits_to_keep=1).hidden for i in range(self.single, self.several)]
        first = read(self.several, end - VERIFIED, cache=cache)
        cache.crop([n - rejected for n, rejected in zip(cache.lengths, REJECTED, strict=True)])
        second = read(end - VERIFIED, end, cache=cache)
        return {
            "prompt": prompt, "decode": torch.cat(one, dim=1),
            "verify": torch.cat([first.hidden, second.hidden], dim=1), "logits": second.logits,
        }  # fmt: skip

    @torch.inference_mode()
    def by_step(self) -> dict[str, Tensor]:
        """The same on steps, of which a prompt gives its last hidden state; and the tokens that they choose."""
        (B, end), one, some, tokens = self.ids.shape, [], [], []
        step = DecodeStep(self.model, B, end)
        prompt = self.read(step.prefill, 0, self.single)[:, None]
        for i in range(self.single, self.several):
            one.append(self.read(step, i, i + 1).clone())
            tokens.append(step.next_tokens())
        step = DecodeStep(self.model, B, end, VERIFIED)
        self.read(step.prefill, 0, self.several)
        for first, rejected in ((self.several, None), (end - VERIFIED, list(REJECTED))):
            some.append(self.read(step, first, first + VERIFIED, rejected).clone())
            tokens.append(step.next_tokens())
        return {
            "prompt": prompt, "decode": torch.cat(one, dim=1), "verify": torch.cat(some, dim=1),
            "tokens": torch.cat(tokens, dim=1),
        }  # fmt: skip

    def by(self, way: str) -> tuple[dict[str, Tensor], float]:
        """What `by_step` or `by_layers` gives, and the share of tokens that would have chosen other experts."""
        found = getattr(self, f"by_{way}")()
        return found, float(self.routes.others / self.routes.seen)


def check_slice(
    config: InklingConfig,
    tp: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "torch",
    experts: str = "nvfp4+mxfp8",
    alone: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Rows of errors: of the reference in float32, then of the backend in `dtype`, for every form and kind of call.

    alone: only of the backend; the reference's ranks, which dequantise expert by expert, take most of the time.
    say: shows what is being done before the first row, which can take minutes.

    ranks, single: of all ranks, and of one device, from the exact; apart: of the ranks from the one device. "rms" is
    over all tokens, "typical" the median of single ones. Of greedy tokens and of chosen experts the share that differs.

    Raises:
        InputError: a model that so many ranks cannot share.
    """
    plans = {form: Plan(tp, **sizes) for form, sizes in FORMS.items()}
    plans["step"].check(config, layer_formats(experts, config.text.num_hidden_layers))
    size = len(REJECTED), min(config.text.sliding_window_size, 1024) + 61 + DECODED + 2 * VERIFIED
    ids = torch.randint(config.text.unpadded_vocab_size, size, generator=torch.Generator().manual_seed(0)).to(device)
    arms = dict.fromkeys([("torch", torch.float32), (backend, dtype)])

    def made(plan: Plan, rank: int) -> Inkling:
        mesh = Mesh.stand_in(plan, rank)
        return synthetic(config, mesh, device, dtype, "torch", experts, cut_from_whole=plan.world > 1)

    say("one device, torch float32: layers")
    whole, single = made(Plan(), 0), {}
    reference = Called(bound(_prepare(whole, "torch", torch.float32)), ids, None)
    exact, chosen = reference.by_layers(), reference.routes.chosen
    del reference
    for arm in arms:
        ways = ("step",) if alone and arm != (backend, dtype) else ("step", "layers")  # the tokens are needed
        say(f"one device, {arm[0]} {dtype_name(arm[1])}: {', '.join(ways)}")
        _prepare(whole, *arm)
        single[arm] = {way: Called(bound(whole, None, arm[0]), ids, chosen).by(way) for way in ways}
    exact["tokens"] = next(iter(single.values()))["step"][0]["tokens"]
    arms = list(arms)[-1:] if alone else arms
    del whole
    gc.collect()
    say(f"weights of {tp} ranks")
    shards = [made(Plan(tp), rank) for rank in range(tp)]
    for arm in arms:
        for shard in shards:
            _prepare(shard, *arm)
        for form, plan in plans.items():
            way = "step" if "step" in form else "layers"
            of_rank = partial(_of_rank, way, shards, arm[0], ids, chosen)
            (first, _), *others = results = in_turn(plan, of_rank)
            expected, others_alone = single[arm][way]
            row = {"backend": arm[0], "dtype": dtype_name(arm[1]), "form": form}
            for kind, x in first.items():
                same, best = expected[kind], exact[kind][:, -x.shape[1] :]
                yield {
                    **row, "call": kind, "alike on all ranks": all(torch.equal(other[kind], x) for other, _ in others),
                    "ranks": distance(x, best), "single": distance(same, best), "apart": distance(x, same),
                }  # fmt: skip
            shares = sum(share for _, share in results) / tp, others_alone
            yield {**row, "call": "experts", **{who: {"differ": n} for who, n in zip(WHO, shares, strict=False)}}


def _of_rank(
    way: str, shards: list[Inkling], backend: str, ids: Tensor, chosen: list[Tensor], mesh: Mesh
) -> tuple[dict[str, Tensor], float]:
    return Called(bound(shards[mesh.rank], mesh, backend), ids, chosen).by(way)


def _prepare(model: Inkling, backend: str, dtype: torch.dtype) -> Inkling:
    """In place; nothing else may hold the tensors, or they are there twice."""
    gc.collect()  # models that were bound to these tensors are circles of references
    model.cast(dtype)
    pack = get_backend(backend).pack_experts
    if pack is not None and dtype == torch.bfloat16:
        for layer in model.llm.layers:
            pack(layer.mlp.experts)
    return model


def distance(x: Tensor, exact: Tensor) -> dict[str, float]:
    """Relative errors of a tensor, or for integers the share of wrong ones."""
    if not x.is_floating_point():
        return {"differ": float((x != exact).double().mean())}
    return {"rms": relative_rms(x, exact), "typical": typical_rms(x, exact)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """The command: a table as it comes, and a report in JSON."""
    parser = argparse.ArgumentParser("python -m inkling_ref.parallel.in_turn", description="Check a slice of a model.")
    parser.add_argument("--preset", choices=("small", "nano"), default="nano")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2, help="ranks; experts are divided among them too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--alone", action="store_true", help="the backend's ranks, not those of the reference before")
    parser.add_argument("--json", type=Path, help="where the report goes")
    asked = parser.parse_args(arguments)
    start, on_gpu = time.perf_counter(), asked.device == "cuda"
    if asked.json is not None:
        check_file(asked.json, "report")
    if on_gpu and not torch.cuda.is_available():
        raise InputError("--device is cuda: torch sees no GPU here, expected one, or --device cpu")
    report = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "preset": asked.preset, "layers": asked.layers, "tp": asked.tp, "rows": [],
    }  # fmt: skip
    print(f"{asked.layers} layers of {asked.preset}, {asked.tp} ranks in turn; {report['device']}, {torch.__version__}")
    print("errors relative to the reference in float32: over all tokens, of the typical one")
    print(f"{'':22}{'ranks':>18}{'one device':>18}{'ranks beside it':>18}")
    heads, config = None, slice_config(asked.preset, asked.layers)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - start:.0f} s] {line}", file=sys.stderr)

    for row in check_slice(config, asked.tp, asked.device, dtype, asked.backend, alone=asked.alone, say=say):
        if heads != (heads := (row["backend"], row["dtype"])):
            print(*heads)
        cells = ("".join(f"{x:9.1e}" for x in row.get(who, {}).values()) for who in WHO)
        note = "" if row.get("alike on all ranks", True) else " *"
        print(f"  {row['form']:12}{row['call']:8}" + "".join(f"{cell:>18}" for cell in cells) + note, flush=True)
        report["rows"].append(row)
        report["seconds"] = time.perf_counter() - start
        if on_gpu:
            report["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        if asked.json is not None:  # whatever comes after this row
            with whole_file(asked.json) as place:
                place.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not all(row.get("alike on all ranks", True) for row in report["rows"]):
        print("* not the same on all ranks")
    if on_gpu:
        print(f"{report['seconds']:.0f} s, at most {report['peak_device_bytes'] / 1e9:.1f} GB")
    return report


if __name__ == "__main__":
    try:
        main()
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
