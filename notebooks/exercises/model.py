"""Exercises of 07_model: a check for each, and a worked solution."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_ref import notebook as nb
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig
from inkling_ref.measure import cost

# ---------------------------------------------------------------- 1: where full layers overtake


def check_1(candidate: Callable) -> None:
    """candidate(text) -> smallest S at which the full layers keep more bytes of keys and values than the sliding."""
    for name in ("small", "nano", "tiny"):
        config = getattr(InklingConfig, name)()
        for every in (1, 2, 3, 4):
            layers = config.text.num_hidden_layers
            types = [FULL if i % every == every - 1 else SLIDING for i in range(layers)]
            text = replace(config.text, layer_types=types)
            found, case = candidate(text), f"{name}, {types.count(FULL)} of {layers} layers full"
            assert isinstance(found, int), f"{case}: expected a number of tokens, got {found!r}"
            for S, more in ((found - 1, False), (found, True)):
                kept = cost.cache_bytes(replace(config, text=text), S)
                full, sliding = kept["full layers"], kept["sliding layers"]
                hint = "not yet more" if more else "more already"
                assert (full > sliding) == more, f"{case}: at S = {S} they keep {full:,} bytes, {hint} than {sliding:,}"


def solution_1(text: TextConfig) -> int:
    """Both grow with S until the window is full; from then on only the full layers do. Where they have the wider keys
    and values of the two they lead from the first token; otherwise S of theirs must exceed W - 1 of the sliding.
    """
    full = sliding = 0
    for i in range(text.num_hidden_layers):
        a = text.attention(i)
        width = a.num_key_value_heads * a.head_dim  # bytes but for a factor that both share
        if a.window is None:
            full += width
        else:
            sliding += width
    return 1 if full > sliding else sliding * (text.sliding_window_size - 1) // full + 1


# ---------------------------------------------------------------- 2: conversations in a given memory


def check_2(candidate: Callable) -> None:
    """candidate(text, memory, S) -> how many conversations of S tokens fit into `memory` bytes."""
    for config, S in ((InklingConfig.small(), 1023), (InklingConfig.small(), 200_000), (InklingConfig.tiny(), 5)):
        one = cost.cache_bytes(config, S).total()
        for memory, wanted in ((one - 1, 0), (one, 1), (7 * one + one // 2, 7)):
            found = candidate(config.text, memory, S)
            assert found == wanted, f"S = {S}, {memory} bytes: expected {wanted}, got {found}"


def solution_2(text: TextConfig, memory: int, S: int) -> int:
    """One conversation is keys and values (bfloat16, of at most W - 1 tokens where a layer slides) and K - 1 inputs of
    the convolutions (float32). A part of a conversation is none, so the division rounds down.
    """
    one = 0
    for i in range(text.num_hidden_layers):
        a = text.attention(i)
        width = 2 * a.num_key_value_heads * a.head_dim
        one += 2 * width * (S if a.window is None else min(S, a.window - 1))
        one += 4 * (text.conv_kernel_size - 1) * (width + 2 * text.hidden_size)
    return memory // one


# ---------------------------------------------------------------- 3: undo a block by hand


def check_3(candidate: Callable) -> None:
    """candidate(inputs, drafted, accepted, K) -> the K - 1 inputs that the next call needs."""
    for S, drafted, accepted, K in ((17, 5, 2, 4), (9, 3, 0, 4), (9, 3, 3, 4), (4, 4, 1, 4), (3, 3, 0, 6)):
        inputs = torch.arange(1.0, 1 + 2 * S * 5).view(2, S, 5)
        right = inputs[:, : S - drafted + accepted]
        wanted = F.pad(right, (0, 0, K - 1, 0))[:, -(K - 1) :]
        found, case = candidate(inputs, drafted, accepted, K), f"S {S}, drafted {drafted}, accepted {accepted}, K {K}"
        assert found.shape == wanted.shape, f"{case}: expected {tuple(wanted.shape)}, got {tuple(found.shape)}"
        assert torch.equal(found, wanted), f"{case}: not the last K - 1 inputs before the next token"


def solution_3(inputs: Tensor, drafted: int, accepted: int, K: int) -> Tensor:
    """The next token stands after the accepted ones; the inputs before it are the last K - 1 up to there. Zeros in
    front serve a sequence that is shorter.
    """
    end = inputs.shape[1] - drafted + accepted
    padded = F.pad(inputs, (0, 0, K - 1, 0))  # input t now stands in place t + K - 1
    return padded[:, end : end + K - 1]


# ---------------------------------------------------------------- 4: a prompt in chunks


class _Counted:
    """A model that notes how many tokens each call reads."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append(ids.shape[1])
        return self.model(ids, *arguments, **keywords)


def check_4(candidate: Callable) -> None:
    """candidate(model, ids, chunk) -> logits [B, V] after the last token."""
    model = _Counted(nb.nano()[0])
    ids = torch.randint(1000, (2, 23), generator=torch.Generator().manual_seed(0))
    wanted = model.model(ids).logits[:, -1]
    for chunk in (7, 23, 40):
        model.calls = []
        found = candidate(model, ids, chunk)
        assert max(model.calls) <= chunk, f"chunk {chunk}: a call read {max(model.calls)} tokens"
        assert sum(model.calls) == ids.shape[1], (
            f"chunk {chunk}: {sum(model.calls)} tokens were read, of {ids.shape[1]}"
        )
        assert found.shape == wanted.shape, f"expected {tuple(wanted.shape)}, got {tuple(found.shape)}"
        assert torch.allclose(found, wanted, atol=1e-3), f"chunk {chunk}: not the logits of one whole call"


def solution_4(model: Any, ids: Tensor, chunk: int) -> Tensor:
    """One cache for both rows; every chunk continues where the last one ended, and only its last logits are wanted."""
    cache = model.new_cache(batch_size=len(ids))
    for part in ids.split(chunk, dim=1):
        logits = model(part, cache=cache, logits_to_keep=1).logits[:, -1]
    return logits
