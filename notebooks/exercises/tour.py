"""Exercises of 00_tour: a check for each, and a worked solution."""

import codecs
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_ref import notebook as nb
from inkling_ref.chat import Tokenizer


def check_1(candidate: Callable) -> None:
    """candidate(tokenizer, text) -> list of the pieces of text that its tokens print."""
    tokenizer = nb.nano()[1]
    for text in ("Anna gives the key to Tom.", "The cafés are near.", "日本 is a place 🙂"):
        found, characters = list(candidate(tokenizer, text)), codecs.getincrementaldecoder("utf-8")()
        assert "\ufffd" not in "".join(found), f"{found}: a part of a character was printed, before the rest had come"
        assert "".join(found) == text, f"joined, the pieces must give {text!r} again, got {''.join(found)!r}"
        wanted = [characters.decode(tokenizer.token_bytes(token)) for token in tokenizer.encode(text)]
        wanted = [piece for piece in wanted if piece]
        assert found == wanted, f"expected {wanted}, got {found}"


def solution_1(tokenizer: Tokenizer, text: str) -> list[str]:
    """Tokens are bytes, and a rare character has more of them than a token holds. What does not decode yet is held
    back (`decode` writes U+FFFD for it) until the next token completes it.
    """
    pieces, held = [], []
    for token in tokenizer.encode(text):
        held.append(token)
        piece = tokenizer.decode(held)
        if "\ufffd" not in piece:
            pieces.append(piece)
            held = []
    return pieces


def check_2(candidate: Callable) -> None:
    """candidate(logits [T, V], tokens [T]) -> mean of -log p."""
    generator = torch.Generator().manual_seed(0)
    logits, tokens = 5 * torch.randn(7, 11, generator=generator), torch.arange(7)
    even = float(candidate(torch.zeros(7, 11), tokens))
    assert abs(even - math.log(11)) < 1e-5, f"all 11 tokens equally likely: log 11 = {math.log(11):.4f}, got {even:.4f}"
    wanted, found = float(F.cross_entropy(logits, tokens)), float(candidate(logits, tokens))
    assert abs(found - wanted) < 1e-4, f"expected {wanted:.4f}, got {found:.4f}"
    large = float(candidate(logits + 1000, tokens))
    assert abs(large - wanted) < 1e-2, f"logits larger by 1000 are the same probabilities, got {large}"


def solution_2(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(z) = z - logsumexp(z), and logsumexp subtracts the largest z before it takes exponentials."""
    log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
    return -log_p.gather(-1, tokens[:, None]).mean()


def check_3(candidate: Callable) -> None:
    """candidate(n, E, k) -> share of the expert parameters."""
    cases = {(1, 384, 8): 8 / 384, (2, 384, 8): 16 / 384, (48, 384, 8): 1.0, (100, 384, 8): 1.0, (3, 16, 4): 12 / 16}
    for (n, E, k), wanted in cases.items():
        found = candidate(n, E, k)
        assert abs(found - wanted) < 1e-9, f"n = {n}, E = {E}, k = {k}: expected {wanted:.4f}, got {found}"


def solution_3(n: int, E: int, k: int) -> float:
    """D and I cancel. At most n k different experts are chosen, and there are no more than E."""
    return min(n * k, E) / E
