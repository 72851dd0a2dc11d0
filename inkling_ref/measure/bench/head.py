"""Times of the logits head with its choice of a token, and of the drafter's RNN head."""

import torch

from ... import fused
from ...dspark import MarkovHead
from ...moe import softcap
from ...residual import wide
from .harness import Bench, D, normal

V, V_STORED, CAP = 200058, 201024, 30.0  # Inkling 2 Small
RANK, DRAFTED = 256, 7


def with_logits(hidden, weight, cap, temperature=0.0, seeds=None, positions=None):
    """`fused.sample_head` as the model does it: rounded products, all logits in memory, the cap always."""
    token = fused.choose(softcap(wide(hidden @ weight.t()), cap), temperature, seeds, positions)
    return token, fused.logit_of(hidden, weight, token)


def bench_head(bench: Bench) -> None:
    """Logits head and choice, greedily and at temperature 0.7, for 1, 8 and 64 rows."""
    from ...kernels import head as kernel

    weight = normal(V_STORED, D, scale=D**-0.5)[:V]
    compiled = torch.compile(with_logits, dynamic=False)
    for N in (1, 64, 8):
        hidden, seeds, positions = normal(N, D, scale=3.0), *(torch.arange(N, device="cuda") for _ in range(2))
        for how, extra in (("greedy", ()), ("temperature 0.7", (0.7, seeds, positions))):
            case, sets = f"head {N} {how}", [(hidden, weight, CAP, *extra)]
            exact, _ = fused.sample_head(*sets[0])
            for name, op in (("triton", kernel.sample_head), ("compiled", compiled), ("eager", with_logits)):
                row = bench.arm(case, name, op, sets, nbytes=weight.nbytes)
                if "failed" not in row:
                    bench.note(f"{case} {name}: rows with the token of float32: {(op(*sets[0])[0] == exact).sum()}")


def bench_draft(bench: Bench) -> None:
    """Seven tokens of the RNN head, for 1 and 8 rows."""
    from ...kernels import dspark as kernel

    head = MarkovHead("rnn", V_STORED, D, RANK).cuda().bfloat16()
    for B in (1, 8):
        base = normal(B, DRAFTED, V, dtype=torch.float32, scale=2.0)
        sets = [(head, normal(B, DRAFTED, D), base, torch.arange(B, device="cuda"))]
        nbytes = DRAFTED * V * RANK * 2 + base.nbytes
        for name, op in (("triton", kernel.draft_rnn), ("eager", fused.draft_rnn)):
            bench.arm(f"draft {B} x {DRAFTED}", name, op, sets, nbytes=nbytes)
        compiled = torch.compile(fused.draft_rnn, dynamic=False)
        bench.arm(f"draft {B} x {DRAFTED}", "compiled", compiled, sets, nbytes=nbytes)
