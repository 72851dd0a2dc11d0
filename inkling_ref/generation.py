"""Generation: from a prompt to new tokens, one at a time, or several with a drafter (see `speculative`).

The prompt runs in one call, or in chunks, and fills a cache, or a `DecodeStep`; then every call appends one token a
row. Prompts are padded on the left, so that the last position of every call is the newest token of every row. A row
that has ended stays in the batch as padding: it neither grows nor reaches a position beyond the context.
"""

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .decode_step import NOT_FINITE, DecodeStep
from .errors import InputError
from .sampling import check_count, check_sampling, probabilities, sample
from .speculative import Drafting, DraftStats, Speculation
from .stepping import Stepping


@dataclass
class Stats:
    """Token counts over all rows, and seconds spent in the model: consumers of a stream cost nothing here."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    decode_steps: int = 0  # calls after the prompt's; each gives a token, or more, to every row that has not ended
    prefill_seconds: float = 0.0  # until the first token of every row is known
    decode_seconds: float = 0.0
    drafting: DraftStats | None = None  # with a drafter


@dataclass
class Generation:
    """What `generate` returns.

    tokens: the new ids of every row; an end-of-sequence id is their last.
    stop_reason: for every row "eos"; "length", max_new_tokens are there; "context", prompt and new tokens fill
        max_position_embeddings; None in a stream that still runs.
    """

    tokens: list[list[int]]
    stop_reason: list[str | None]
    stats: Stats


class Stream:
    """Iterator over steps. A step is a list: the new token of every row, None for a row that got none.

    A row gets none once it has ended. With a drafter a round gives several steps, to some rows more than to others.

    `result` grows along, and is complete when the iterator ends.
    """

    def __init__(self, steps: Iterator[list[int | None]], result: Generation) -> None:
        self._steps, self.result = steps, result

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> list[int | None]:
        return next(self._steps)


def generate(
    model: Any,
    input_ids: Any,
    max_new_tokens: int = 64,
    temperature: Real = 0.0,
    top_k: Real | None = None,
    top_p: Real | None = None,
    seed: int | None = None,
    eos_token_id: Any = None,
    pixel_values: Float[Tensor, "tiles p p 3"] | None = None,
    image_grid_thw: Int[Tensor, "images 3"] | None = None,
    drafter: Any = None,
    attention_mask: Any = None,
    prefill_chunk: int | None = None,
    on_token: Callable[[int, int], Any] | None = None,
    step: DecodeStep | None = None,
) -> Generation:
    """Continue prompts.

    Nothing is left behind on the model: every call has its own cache and its own random numbers.

    Args:
        model: an `Inkling`.
        input_ids: integers [B, T] or [T], or a list of rows, which may differ in length.
        max_new_tokens: at most that many new tokens a row; an end-of-sequence id or the context may end it earlier.
        temperature, top_k, top_p: see `probabilities`. The default is greedy.
        seed: makes sampling reproducible; None draws a fresh one. The global random state is not touched.
        eos_token_id: id or list of ids that end a row; None takes the config's, [] has none.
        pixel_values, image_grid_thw: the images of all prompts, row by row, from `process_images`.
        drafter: a `Drafter` of this model, or a `Drafting` with one: the same text, or distribution of texts, in fewer
            passes of the model.
        attention_mask: shape of input_ids, true = token, false = padding, wherever it stands.
        prefill_chunk: read the prompt that many positions a call, to bound memory; the result is the same.
        on_token: called as on_token(row, token) for every new token.
        step: of this model and as many rows: prompt and new tokens fill its places instead of a cache, and decoding is
            `step.capture`d if it was before. One generation at a time. Tokens are chosen on the device, unless top_k or
            top_p need all logits; those drawn of a seed are others than without a step. For a drafter (or a
            `DraftStep`, which has fixed addresses too) make it as DecodeStep(..., tokens=1 + drafts of a round,
            taps=drafter.config).

    Raises:
        InputError: naming the argument that cannot be used, or the position whose logits are not finite.
    """
    steps = stream(
        model, input_ids, max_new_tokens, temperature, top_k, top_p, seed, eos_token_id,
        pixel_values, image_grid_thw, drafter, attention_mask, prefill_chunk, step,
    )  # fmt: skip
    for step in steps:
        if on_token is not None:
            for row, token in enumerate(step):
                if token is not None:
                    on_token(row, token)
    return steps.result


def stream(
    model: Any,
    input_ids: Any,
    max_new_tokens: int = 64,
    temperature: Real = 0.0,
    top_k: Real | None = None,
    top_p: Real | None = None,
    seed: int | None = None,
    eos_token_id: Any = None,
    pixel_values: Float[Tensor, "tiles p p 3"] | None = None,
    image_grid_thw: Int[Tensor, "images 3"] | None = None,
    drafter: Any = None,
    attention_mask: Any = None,
    prefill_chunk: int | None = None,
    step: DecodeStep | None = None,
) -> Stream:
    """`generate`, step by step: the arguments are checked at once, the model runs as the stream is read."""
    drafting = drafter if drafter is None or isinstance(drafter, Drafting) else Drafting(drafter)
    if (pixel_values is None) != (image_grid_thw is None):
        raise InputError(
            "pixel_values and image_grid_thw: one is missing, expected both as process_images returns them"
        )
    check_sampling(temperature, top_k, top_p)
    check_count("max_new_tokens", max_new_tokens, 0)
    if prefill_chunk is not None:
        check_count("prefill_chunk", prefill_chunk, 1)
    config = model.config.text
    rows = read_rows(input_ids, attention_mask, config.unpadded_vocab_size)
    limit = config.max_position_embeddings
    for row, prompt in enumerate(rows):
        if len(prompt) > limit:
            raise InputError(f"input_ids: row {row} has {len(prompt)} tokens, max_position_embeddings is {limit}")
    eos = _read_eos(config.eos_token_id if eos_token_id is None else eos_token_id, config.vocab_size)
    generator = torch.Generator(device=model.device)
    if seed is None:
        generator.seed()
    elif isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 2**64:
        generator.manual_seed(seed)
    else:
        raise InputError(f"seed is {seed!r}, expected an integer from -2**63 to 2**64 - 1")

    most = [min(max_new_tokens, limit - len(prompt)) for prompt in rows]
    speculation = stepping = seeds = None
    if drafting is not None:
        speculation = Speculation(model, drafting, len(rows), temperature, top_k, top_p, generator)
    if step is not None:
        needed = [len(prompt) + count for prompt, count in zip(rows, most, strict=True)]
        if top_k is None and top_p is None:
            seeds = torch.randint(2**63 - 1, (len(rows),), generator=generator, device=model.device)
        drafts = (drafting.drafter, speculation.width) if drafting else ()
        stepping = Stepping(step, model, needed, temperature, seeds, *drafts)

    stats = Stats(prompt_tokens=sum(map(len, rows)), drafting=speculation and speculation.stats)
    result = Generation([[] for _ in rows], [None] * len(rows), stats)

    def end(row: int) -> None:
        """Notes why a row gets no further token, if so. Called before the row's next position is computed."""
        tokens = result.tokens[row]
        if tokens and tokens[-1] in eos:
            result.stop_reason[row] = "eos"
        elif len(tokens) == max_new_tokens:
            result.stop_reason[row] = "length"
        elif len(rows[row]) + len(tokens) == limit:
            result.stop_reason[row] = "context"

    def steps() -> Iterator[list[int | None]]:
        cache, chosen = None, None
        while any(running := [reason is None for reason in result.stop_reason]):
            start, is_prefill = time.perf_counter(), cache is None
            if speculation is not None and not is_prefill:
                room = [m - len(t) if r else 0 for m, t, r in zip(most, result.tokens, running, strict=True)]
                new = speculation.round(cache, chosen, room, eos)
                chosen = torch.tensor([tokens[-1] if tokens else 0 for tokens in new], device=model.device)
            else:
                if stepping is not None and not is_prefill:
                    chosen = _step(stepping, chosen, running, temperature, top_k, top_p, generator)
                else:
                    if is_prefill:
                        read = stepping or model if speculation is None else speculation.read
                        cache = model.new_cache(len(rows), rollback=0) if stepping is None else stepping.begin()
                        logits = _prefill(model, read, cache, rows, pixel_values, image_grid_thw, prefill_chunk)
                    else:
                        logits = _decode(model, chosen, cache, running)
                    assert logits.shape[-1] == config.unpadded_vocab_size  # padded rows of the vocabulary have none
                    chosen = _choose(logits, temperature, top_k, top_p, generator)
                # Here, and nowhere else, a step waits for the device.
                new = [[t] if is_running else [] for t, is_running in zip(chosen.tolist(), running, strict=True)]
            _count(result.stats, time.perf_counter() - start, sum(map(len, new)), is_prefill)

            for step in map(list, zip_longest(*new)):
                for row, token in enumerate(step):
                    if token is None:
                        continue
                    if token == NOT_FINITE:
                        position = len(rows[row]) + len(result.tokens[row]) - 1
                        raise InputError(
                            f"logits: not finite in row {row} at position {position}; are the weights sound?"
                        )
                    result.tokens[row].append(token)
                    end(row)
                yield step

    for row in range(len(rows)):
        end(row)
    return Stream(steps(), result)


def _count(stats: Stats, seconds: float, new_tokens: int, is_prefill: bool) -> None:
    stats.new_tokens += new_tokens
    if is_prefill:
        stats.prefill_seconds = seconds
    else:
        stats.decode_steps += 1
        stats.decode_seconds += seconds


@torch.inference_mode()
def _prefill(
    model: Any,
    read: Callable,
    cache: Any,
    rows: list[list[int]],
    pixel_values: Tensor | None,
    image_grid_thw: Tensor | None,
    chunk: int | None,
) -> Float[Tensor, "B V"]:
    """Fill a cache with the prompts; the logits after each. `read`: the model, or what stands around it."""
    T = max(map(len, rows))
    ids = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=model.device)
    padding = torch.tensor([T - len(row) for row in rows], device=model.device)
    mask = torch.arange(T, device=model.device) >= padding[:, None]
    padded = any(len(row) < T for row in rows)
    features = None
    if pixel_values is not None:
        features = model.image_features(pixel_values.to(model.device), image_grid_thw.to(model.device))
    if model.visual is not None:
        # Checked for the whole prompt: a chunk cannot know what other chunks hold.
        places = mask & (ids == model.config.image_token_id)
        wanted, given = int(places.sum()), 0 if features is None else len(features)
        if wanted != given:
            raise InputError(f"images: the prompts have {wanted} image tokens, the images have {given} tiles")
        feature_at = places.flatten().cumsum(0).view_as(ids) - 1

    for start in range(0, T, chunk or T):
        part = slice(start, start + (chunk or T))
        logits = read(
            ids[:, part],
            cache=cache,
            attention_mask=mask[:, part] if padded else None,
            image_features=None if features is None else features[feature_at[:, part][places[:, part]]],
            logits_to_keep=1,
        ).logits[:, -1]
    return logits


@torch.inference_mode()
def _decode(model: Any, tokens: Int[Tensor, " B"], cache: Any, running: list[bool]) -> Float[Tensor, "B V"]:
    """The logits after one more token a row. Rows that have ended are padding: they do not grow."""
    mask = None
    if not all(running):
        mask = torch.tensor(running, device=tokens.device)[:, None]
    return model(tokens[:, None], cache=cache, attention_mask=mask, logits_to_keep=1).logits[:, -1]


@torch.inference_mode()
def _step(
    stepping: Stepping,
    tokens: Int[Tensor, " B"],
    running: list[bool],
    temperature: Real,
    top_k: Real | None,
    top_p: Real | None,
    generator: torch.Generator,
) -> Int[Tensor, " B"]:
    """The next token of every row after one more token a row, as `_choose`; on the device, if that can choose."""
    ids = tokens.clamp(min=0)[:, None]  # rows that have ended may bear no id
    output = stepping.append(ids, [int(is_running) for is_running in running])
    if stepping.seeds is not None:
        return stepping.tokens()[:, 0]
    return _choose(output.logits[:, -1], temperature, top_k, top_p, generator)


@torch.inference_mode()
def _choose(
    logits: Float[Tensor, "B V"],
    temperature: Real,
    top_k: Real | None,
    top_p: Real | None,
    generator: torch.Generator,
) -> Int[Tensor, " B"]:
    """The next token of every row; NOT_FINITE where the largest logit is NaN (as any NaN makes it) or infinite."""
    largest, token = logits.max(dim=-1)  # of equal logits the first
    sound = largest.isfinite()
    if temperature != 0:
        # A NaN would make the draw of the other rows fail too.
        logits = torch.where(sound[:, None], logits, 0)
        token = sample(probabilities(logits, temperature, top_k, top_p), generator)
    return torch.where(sound, token, NOT_FINITE)


def _read_eos(eos: Any, vocab_size: int) -> set[int]:
    ids = [] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(f"eos_token_id is {eos!r}, expected ids with 0 <= id < {vocab_size}")
    return set(ids)


def read_rows(input_ids: Any, attention_mask: Any, vocab_size: int, name: str = "input_ids") -> list[list[int]]:
    """The tokens of every row, without padding. Raises InputError about the argument `name`."""
    rows = _as_rows(name, input_ids)
    masks = [[1] * len(row) for row in rows] if attention_mask is None else _as_rows("attention_mask", attention_mask)
    if [len(mask) for mask in masks] != [len(row) for row in rows]:
        raise InputError(f"attention_mask: expected one entry for every entry of {name}")
    prompts = []
    for row, (ids, mask) in enumerate(zip(rows, masks, strict=True)):
        prompt = []
        for column, (token, is_token) in enumerate(zip(ids, mask, strict=True)):
            if not is_token:
                continue
            if not 0 <= token < vocab_size:
                raise InputError(f"{name}: row {row}, column {column} is {token}, expected 0 <= id < {vocab_size}")
            prompt.append(token)
        if not prompt:
            raise InputError(f"{name}: row {row} has no tokens, expected at least one")
        prompts.append(prompt)
    return prompts


def _as_rows(name: str, values: Any) -> list[list[int]]:
    """Integers as a list of rows, from a tensor or array [B, T] or [T], or from lists."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or not values:
        raise InputError(f"{name} is {values!r:.40}, expected integers [B, T], [T], or a list of rows")
    rows = values if isinstance(values[0], (list, tuple)) else [values]
    try:
        return [[operator.index(v) for v in row] for row in rows]
    except TypeError:
        raise InputError(f"{name}: expected integers [B, T], [T], or a list of rows") from None
