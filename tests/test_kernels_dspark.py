"""Contract of the drafter's RNN head: the tokens that the reference drafts."""

import pytest
import torch
from kernel_contract import DEVICE, dtypes, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused
from inkling_ref.dspark import MarkovHead
from inkling_ref.errors import InputError
from inkling_ref.kernels import dspark

pytestmark = needs_device

SHAPES = {  # B, n, V used, V, D, r
    "one row": (1, 7, 301, 310, 37, 24), "one token": (3, 1, 129, 129, 20, 16), "odd": (17, 2, 130, 200, 33, 23),
}  # fmt: skip


def block(B, n, V, stored, D, r, dtype):
    """A head with corrections that matter, and its inputs."""
    torch.manual_seed(5)
    head = MarkovHead("rnn", stored, D, r)
    head.markov_w2.weight.data *= 8
    h, base, anchors = torch.randn(B, n, D), 2 * torch.randn(B, n, V), torch.randint(stored, (B,))
    head = head.to(DEVICE, dtype)
    return head, h.to(DEVICE, dtype), base.to(DEVICE), anchors.to(DEVICE)


def regret(head, h, base, anchors, tokens):
    """By how much the float64 logits of drafted tokens fall short of the best, given the tokens before them."""
    head, h, base = (t.double() for t in (head, h, base))
    s, previous, worst = head.start(h[:, 0]), anchors, 0.0
    for k in range(h.shape[1]):
        correction, s = head.step(h[:, k], previous, s, base.shape[-1])
        logits = base[:, k] + correction
        previous = tokens[:, k]
        worst = max(worst, float((logits.amax(-1) - logits.gather(1, previous[:, None])[:, 0]).max()))
    return worst


@dtypes
@pytest.mark.parametrize(("B", "n", "V", "stored", "D", "r"), SHAPES.values(), ids=SHAPES)
def test_greedy(B, n, V, stored, D, r, dtype):
    inputs = block(B, n, V, stored, D, r, dtype)
    with torch.inference_mode():
        tokens, eager = (f(*inputs) for f in (dspark.draft_rnn, fused.draft_rnn))
        assert tokens.dtype == torch.int64
        assert regret(*inputs, tokens) <= max(1.5 * regret(*inputs, eager), 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_is_the_reference(temperature):
    head, h, base, anchors = block(5, 4, 301, 310, 37, 24, torch.float32)
    seeds = torch.arange(5, device=DEVICE) - 2**40
    positions = seeds[:, None].abs() + torch.arange(4, device=DEVICE)
    with torch.inference_mode():
        tokens = dspark.draft_rnn(head, h, base, anchors, temperature, seeds, positions)
        exact = fused.draft_rnn(head.double(), h.double(), base.double(), anchors, temperature, seeds, positions)
    assert torch.equal(tokens, exact)


def test_a_token_depends_on_those_before():
    head, h, base, anchors = block(4, 3, 301, 310, 37, 24, torch.float32)
    base *= 0.1
    with torch.inference_mode():
        first, second = (dspark.draft_rnn(head, h, base, a) for a in (anchors, anchors.flip(0)))
    assert not torch.equal(first[:, 2], second[:, 2])


def test_refuses_another_head():
    head, (h, base, anchors) = MarkovHead("gated", 20, 6, 4).to(DEVICE), block(1, 1, 20, 20, 6, 4, torch.float32)[1:]
    with pytest.raises(InputError, match="triton draft_rnn: a head of kind 'gated', expected 'rnn'"):
        dspark.draft_rnn(head, h, base, anchors)
