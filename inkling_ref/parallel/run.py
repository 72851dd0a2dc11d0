"""`inkling-ref run`: one process of a world under torchrun, or one rank of a larger world alone; a report in JSON.

Alone (`only_rank`), a rank computes what it would in its world, on the same number of tokens, and exchanges nothing:
its collectives are stand-ins of the same shape, counted, and their seconds come from the alpha-beta model of
`collectives.Link`. Activations are then not the model's, and the tokens mean nothing. What that leaves out makes the
time too short: waiting for the slowest rank, traffic that disturbs computation, the launch of eight processes.
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist

from ..chat import Tokenizer, render
from ..checkpoint import layer_formats
from ..config import InklingConfig
from ..decode_step import DecodeStep
from ..errors import InputError
from ..files import whole_file
from ..model import Inkling
from ..quantization import dtype_name
from .apply import Mesh, load
from .arms import compiled, use
from .collectives import Link, entering, moment, seconds_between, waited
from .drafter import load_drafter
from .generation import generate
from .launch import rank_and_size, variable, world
from .plan import Plan, split
from .synthetic import synthetic, synthetic_drafter

ALONE = "one rank's compute; collectives modelled, not run"
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
WARM = 100  # replays before steps are timed: a GPU that waited for a compiler takes a while to come to its clock
GRAPH = "a step is one CUDA graph; its collectives are counted, not timed, and its pairs of experts are not counted"
TOGETHER = "all ranks run; seconds in collectives include waiting for other ranks"


def main(
    out: Path,
    plan: Plan,
    checkpoint: Path | None = None,
    preset: str | None = None,
    prompt: str | None = None,
    images: list[Path] | None = None,
    tokens: list[list[int]] | None = None,
    random_tokens: tuple[int, int] | None = None,
    max_new_tokens: int = 16,
    prefill_chunk: int | None = None,
    draft: bool = False,
    only_rank: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "torch",
    experts: str = "nvfp4+mxfp8",
    skew: float = 0.0,
    link: Link | None = None,
    timeout: float = 300,
    trace: bool = False,
    graph: bool = False,
    filled: bool = False,
    step_tokens: int = 1,
) -> dict[str, Any]:
    """Run and report; rank 0, or the only one, writes `out`.

    Args:
        checkpoint, preset: a folder, or the name of a config for synthetic weights.
        prompt, tokens, random_tokens: a question; rows of ids; or (rows, tokens) of random ids. Rows are dealt to the
            dp groups in runs; a group may have none.
        trace: record when every module and collective began and how long it took; the device is waited for at each,
            which makes the pass slower.
        graph: decode with fixed addresses (`DecodeStep`), on a GPU as one CUDA graph.
        backend: "compile": the operations of `filled` steps of synthetic weights through `torch.compile`, see `arms`.
        filled: of random_tokens with graph: nothing is read, random keys and values stand for what would have been;
            then max_new_tokens steps of `step_tokens` random ids a row.

    Raises:
        InputError: what can be known before the processes meet.
    """
    _, size = rank_and_size()
    config = InklingConfig.from_pretrained(checkpoint) if checkpoint else getattr(InklingConfig, preset)()
    plan.check(config)
    if preset:
        try:
            plan.check(config, layer_formats(experts, config.text.num_hidden_layers))
        except InputError as error:
            raise InputError(f"--experts is {experts}: {error}, or --experts bf16") from None
    if only_rank is not None and size > 1:
        raise InputError(f"--only-rank under torchrun with {size} processes, expected a single process")
    if only_rank is None and size != plan.world:
        ranks = f"tp {plan.tp} x dp {plan.dp} = {plan.world}"
        how = f"torchrun --nproc-per-node {plan.world}, or --only-rank"
        raise InputError(f"{size} processes, expected {ranks}: {how}")
    if prompt is not None and checkpoint is None:
        raise InputError("--prompt needs a tokenizer, expected --checkpoint with it")
    pixels = {}
    longest = config.text.max_position_embeddings - 1
    limit = f"max_position_embeddings is {longest + 1}, with a new token"
    if prompt is not None:
        parts = [*({"type": "image", "image": str(path)} for path in images or []), prompt]
        messages = [{"role": "user", "content": parts}]
        tokenizer = Tokenizer.from_pretrained(checkpoint)
        rendered = render(messages, tokenizer, config=config)
        tokens = [rendered.input_ids]
        if rendered.pixel_values is not None:
            pixels = {"pixel_values": rendered.pixel_values, "image_grid_thw": rendered.image_grid_thw}
    elif random_tokens is not None:
        if not 0 < random_tokens[1] <= longest:
            raise InputError(f"--context is {random_tokens[1]}, expected 1 to {longest}: {limit}")
        read = random_tokens[1] + max_new_tokens * step_tokens
        if filled and read > longest + 1:
            raise InputError(
                f"--context {random_tokens[1]} and {max_new_tokens} steps of {step_tokens} tokens: {read} positions, "
                f"expected at most max_position_embeddings, {longest + 1}"
            )
        generator = torch.Generator().manual_seed(0)
        below = min(config.text.unpadded_vocab_size, config.image_token_id if config.vision else 2**31)
        if filled:
            tokens = [[] for _ in range(random_tokens[0])]
        else:
            tokens = torch.randint(below, random_tokens, generator=generator).tolist()
    for row, ids in enumerate(tokens):  # longer ones would not be read at all
        if len(ids) > longest:
            raise InputError(f"row {row} has {len(ids)} tokens, expected at most {longest}: {limit}")
    if device == "cuda":
        torch.cuda.set_device(variable("LOCAL_RANK", 0, torch.cuda.device_count()))

    asked = {"--max-new-tokens": max_new_tokens, "--prefill-chunk": prefill_chunk, "--draft": draft}
    asked |= {"--experts": experts, "--skew": skew, "--device": device}
    asked |= {"--graph": graph, "--filled": filled and random_tokens, "--step-tokens": step_tokens}
    asked |= {"config": crc32(repr(config).encode()), "tokens": crc32(repr(tokens).encode())}
    with _place(plan, only_rank, device, timedelta(seconds=timeout), asked) as mesh:
        rows = split(len(tokens), plan.dp)[mesh.rank // plan.tp]
        if only_rank is not None and not rows:  # in a world it would work for the other groups; alone it does nothing
            some = f"{plan.dp} or more (dp)"
            raise InputError(f"--only-rank {only_rank}: {len(tokens)} rows leave none to its group, expected {some}")
        start = time.perf_counter()
        if checkpoint:
            model = load(checkpoint, mesh, device, dtype, backend)
            drafter = load_drafter(checkpoint, model) if draft else None
        else:
            is_compiled = backend == "compile"
            model = synthetic(config, mesh, device, dtype, "torch" if is_compiled else backend, experts, skew)
            if is_compiled:
                use(model, compiled(model, random_tokens[1]))
            drafter = synthetic_drafter(model) if draft else None
        load_seconds = time.perf_counter() - start
        prompts = [tokens[i] for i in rows] or None
        options = {"max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk, "drafter": drafter, **pixels}
        if filled:
            own = measure_filled(model, *random_tokens, max_new_tokens, step_tokens)
        else:
            own = measure(model, prompts, options, trace, graph)
        note = TOGETHER if only_rank is None else ALONE
        head = {"rank": mesh.rank, "note": note, "load_seconds": load_seconds}
        own = {**head, "bytes_read": sum(getattr(part, "bytes_read", 0) for part in (model, drafter)), **own}
        ranks = [own]
        if only_rank is None and plan.world > 1:
            ranks = [None] * plan.world
            with entering(mesh.world.ranks, "the reports"):
                dist.all_gather_object(ranks, own)
        link = link or Link()
        report = {
            "note": note,
            "model": str(checkpoint or f"synthetic {preset}, experts {experts}, skew {skew}"),
            "plan": {**asdict(plan), "ep": plan.n_ep, "etp": plan.etp, "world": plan.world},
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "dtype": dtype_name(dtype),
            "prompt tokens of each row": [random_tokens[1] if filled else len(row) for row in tokens],
            **({"graph": GRAPH} if graph and device == "cuda" else {}),
            **({} if prompt is None or only_rank is not None else {"answer": tokenizer.decode(ranks[0]["tokens"][0])}),
            "ranks": ranks,
        }
        if trace:  # the report then opens in Perfetto, or chrome://tracing
            report["traceEvents"] = [event for rank in ranks for event in rank.pop("events")]
        if only_rank is not None:
            report["link"] = asdict(link)
            report["modelled collective seconds"] = {"note": ALONE, **modelled(own["traffic"], link)}
            for count in (count for counts in own["traffic"].values() for count in counts.values()):
                del count["seconds"]  # of a stand-in
                count["modelled seconds"] = link.seconds(count["calls"], count["sent"])
        if mesh.rank == 0 or only_rank is not None:
            with whole_file(out) as partial:
                partial.write_text(_text(report), encoding="utf-8")
    return report


def _text(report: dict[str, Any]) -> str:
    """JSON for people too: a list of numbers is one line."""
    lines = json.dumps(report, indent=1) + "\n"
    return re.sub(r"\[\n[^][{}\"]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", lines)


def summary(report: dict[str, Any]) -> list[str]:
    """A few lines for people: every number of a lone rank beside what it is."""
    lines = []
    for rank in report["ranks"]:
        who = f"rank {rank['rank']}" + (" alone" if rank["note"] == ALONE else "")
        parts = [f"{who}: {rank['memory']['weight_bytes'] / 1e9:.3g} GB of weights"]
        if rank["tokens"] is None:
            parts.append("no prompts, only experts")
        else:
            if "step_seconds" in rank:
                parts.append(f"{rank['prompt_tokens']} tokens unread")
            else:
                parts.append(f"{rank['prompt_tokens']} tokens in {rank['prefill_seconds']:.3g} s")
            if rank["decode_steps"]:
                step = median(rank.get("step_seconds") or [rank["decode_seconds"] / rank["decode_steps"]])
                parts.append(f"{1000 * step:.3g} ms a step")
        lines.append(" | ".join(parts))
    plan = report["plan"]
    if plan["sequence"]:
        busy = next(rank for rank in report["ranks"] if rank["passes"])
        passes, cut = (busy[name].get("prefill", 0) for name in ("passes", "passes cut by tokens"))
        why = "" if cut else f" (--sequence-from is {plan['sequence_from']})"
        lines.append(f"--sequence: {cut} of {passes} prefill calls cut by tokens{why}")
    if "link" in report:
        link, phases = report["link"], report["modelled collective seconds"]
        of_phases = [f"{seconds:.3g} s of {phase}" for phase, seconds in phases.items() if phase != "note"]
        on_top = f"modelled, on top: {', '.join(of_phases) or 'nothing'}"
        at = f"{1e6 * link['alpha']:g} us a call, {link['usable']:.0%} of {link['bandwidth'] / 1e9:g} GB/s"
        lines += [report["note"], *wrap(on_top, 80, subsequent_indent="  "), f"  at {at}"]
    return lines


@contextmanager
def _place(
    plan: Plan, only_rank: int | None, device: str, timeout: timedelta, asked: dict[str, object]
) -> Iterator[Mesh]:
    if only_rank is not None:
        yield Mesh.stand_in(plan, only_rank)
        return
    with world(plan, device, timeout, asked) as mesh:
        yield mesh


def modelled(traffic: dict[str, dict[str, dict[str, int | float]]], link: Link) -> dict[str, float]:
    """Seconds of a phase's collectives, none overlapped with computation."""
    return {
        phase: sum(link.seconds(count["calls"], count["sent"]) for count in counts.values())
        for phase, counts in traffic.items()
    }


def measure(
    model: Inkling, prompts: list[list[int]] | None, options: dict, trace: bool, graph: bool = False
) -> dict[str, Any]:
    """One generation: tokens, seconds, bytes and work of this rank."""
    traffic, drafter, caches, step = model.mesh.traffic, options["drafter"], [], None

    def keep(make: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*sizes: int, **named: int) -> Any:
            caches.append(make(*sizes, **named))
            return caches[-1]

        return kept

    model.new_cache = keep(model.new_cache)
    if drafter is not None:
        drafter.new_context = keep(drafter.new_context)
    if graph:
        traffic.phase = "making the step"
        tokens, taps = (1, None) if drafter is None else (1 + drafter.num_draft_tokens, drafter.config)
        longest = max(map(len, prompts)) + options["max_new_tokens"]
        longest = min(longest, model.config.text.max_position_embeddings)
        step = ready(DecodeStep(model, len(prompts), longest + tokens, tokens, taps=taps))
    traffic.phase = "prefill"
    events = _events(model) if trace else None

    def decoding(row: int, token: int) -> None:
        traffic.phase = "decode"

    result = generate(model, prompts, on_token=decoding, step=step, **options)
    timing = {}
    if prompts is not None:
        stats = result.stats
        timing = {
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "prefill_seconds": stats.prefill_seconds,
            "decode_steps": stats.decode_steps,
            "decode_seconds": stats.decode_seconds,
            "drafting": stats.drafting and asdict(stats.drafting),
        }
        _count_replays(model, stats.decode_steps)
    parts = [model] if drafter is None else [model, drafter]
    cache_bytes = sum(cache.num_bytes() for cache in caches) + (0 if step is None else step.num_bytes)
    return {
        "tokens": None if result is None else result.tokens,
        **timing,
        **_holds_and_did(model, parts, cache_bytes),
        **({"events": events} if trace else {}),
    }


@torch.inference_mode()
def measure_filled(model: Inkling, rows: int, context: int, steps: int, tokens: int) -> dict[str, Any]:
    """`steps` steps of random ids after `context` positions that nobody has read: seconds of each, and as `measure`.

    Of a graph also `replay_seconds`: of as many replays one after the other, in which the device waits for nobody. And
    one step more is launched operation by operation, to count pairs of tokens and experts. Before all, a graph is
    replayed WARM times, untimed.
    """
    model.mesh.traffic.phase = "making the step"
    step = ready(DecodeStep(model, rows, context + (steps + 1) * tokens, tokens))
    generator = torch.Generator(device=model.device).manual_seed(0)
    used, seconds = model.config.text.unpadded_vocab_size, []
    ids = torch.randint(used, (steps + 1, rows, tokens), generator=generator, device=model.device)
    if step.graph is not None:
        step(ids[0])
        for _ in range(WARM):  # a number, not a time: ranks have to make as many
            replay(step)
    step.fill([context] * rows)
    model.mesh.traffic.phase = "decode"
    for some in ids[:steps]:
        start = waited(model.device)
        step(some)
        step.next_tokens()
        seconds.append(waited(model.device) - start)
    _count_replays(model, steps)
    timing = {
        "prompt_tokens": rows * context, "new_tokens": rows * steps * tokens, "decode_steps": steps,
        "decode_seconds": sum(seconds), "step_seconds": seconds,
    }  # fmt: skip
    if step.graph is not None:
        moments = [moment(model.device)]
        for _ in range(steps + 1):
            replay(step)
            moments.append(moment(model.device))
        timing["replay_seconds"] = [seconds_between(*both) for both in pairwise(moments)][1:]  # launched ahead
        model.mesh.traffic.phase, step.graph = "one step, not a graph", None
        step(ids[steps])
    return {"tokens": [], **timing, **_holds_and_did(model, [model], step.num_bytes)}


def replay(step: DecodeStep) -> None:
    """A captured step and its head once more, at the same place: for timing."""
    step.graph.replay()


def ready(step: DecodeStep) -> DecodeStep:
    """On a GPU a step that is captured, with its head."""
    if step.ids.is_cuda:
        step.model.mesh.traffic.phase = "capture"
        step.capture(greedy=True)
        for layer in step.model.llm.layers:
            layer.mlp.tokens = layer.mlp.pairs = 0
    return step


def _count_replays(model: Inkling, steps: int) -> None:
    """The collectives of a graph were counted twice, for it runs once before it is captured, and not when it ran."""
    counts = model.mesh.traffic.counts
    for phase, what in [key for key in counts if key[0] == "capture"]:
        count, decode = counts.pop((phase, what)), counts["decode", what]
        decode.calls, decode.sent = decode.calls + count.calls // 2 * steps, decode.sent + count.sent // 2 * steps


def _holds_and_did(model: Inkling, parts: list[torch.nn.Module], cache_bytes: int) -> dict[str, Any]:
    """Memory, and the work of this rank."""
    memory = {
        "weight_bytes": sum(t.nbytes for part in parts for t in (*part.parameters(), *part.buffers())),
        "cache_bytes": cache_bytes,
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT,
    }
    if model.device.type == "cuda":
        memory["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    share = model.share
    return {
        "memory": memory,
        "passes": dict(model.current.passes),
        "passes cut by tokens": dict(model.current.cut_passes),
        "traffic": model.mesh.traffic.to_dict(),
        "local experts": [share.local_experts.start, share.local_experts.stop],
        "pairs of tokens and experts, by layer": [int(layer.mlp.pairs) for layer in model.llm.layers],
        "share of the pairs it has seen": _seen_share(model),
    }


def _seen_share(model: Inkling) -> float | None:
    """Pairs computed here over all pairs of the tokens that came by.

    All come by where partial sums are added up: 1 / ep on the mean rank. Sent tokens come only to an expert of theirs.
    """
    moes = [layer.mlp for layer in model.llm.layers]
    seen = sum(moe.tokens for moe in moes) * model.config.text.num_experts_per_tok
    return sum(int(moe.pairs) for moe in moes) / seen if seen else None


def _events(model: Inkling) -> list[dict[str, Any]]:
    """A list that fills with the spans of modules and collectives, in microseconds: Chrome's trace format."""
    events: list[dict[str, Any]] = []
    rank, begun = model.mesh.rank, {}

    def now() -> float:
        return 1e6 * waited(model.device)

    def watch(module: torch.nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: begun.__setitem__(name, now()))
        module.register_forward_hook(lambda *_: span(name, begun[name], now()))

    def span(name: str, start: float, end: float, sent: int | None = None) -> None:
        event = {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": start, "dur": end - start}
        events.append(event if sent is None else {**event, "args": {"bytes sent": sent}})

    watch(model.llm, "text stack")
    watch(model.llm.embed, "embed")
    for i, layer in enumerate(model.llm.layers):
        for name in ("attn", "attn_sconv", "mlp", "mlp_sconv"):
            watch(getattr(layer, name), f"layer {i} {name}")
    model.mesh.traffic.listener = span
    return events
