"""Contract of every Triton kernel: what the reference gives, over every argument, in every dtype that runs here.

On a CPU under Triton's interpreter in float32 and float16 (its bfloat16 is wrong); on a GPU in bfloat16 as well.
"""

import math

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from test_attention import operands

pytest.importorskip("triton", reason="the kernels need Triton")

from inkling_ref import attention, moe, residual, short_conv
from inkling_ref.errors import InputError
from inkling_ref.kernels import INTERPRETED
from inkling_ref.kernels import attention as attention_kernel
from inkling_ref.kernels import moe as moe_kernel
from inkling_ref.kernels import residual as residual_kernel
from inkling_ref.kernels import short_conv as short_conv_kernel
from inkling_ref.kernels.backend import triton_backend

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="Triton without TRITON_INTERPRET=1, and no GPU"
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """New tensors hold NaN (ids: -1), so that an element that is not written shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(math.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", poisoned)


def placed(t, dtype=None):
    """The same values on the device, in the middle of memory that holds NaN."""
    t = t.to(DEVICE, dtype if t.is_floating_point() else t.dtype)
    if not t.is_floating_point():
        return t
    memory = torch.full((t.numel() + 128,), math.nan, dtype=t.dtype, device=DEVICE)
    return memory[64 : 64 + t.numel()].view(t.shape).copy_(t)


def bound(dtype, eager, exact):
    """1.5 times the reference's own error in that dtype; rounding alone where the reference happens to be better."""
    floor = 16 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    return max(1.5 * relative_rms(eager, exact), floor)


def check(kernel, reference, tensors, dtype, **arguments):
    """One output of `kernel` against `reference` in float64 on the same rounded inputs."""
    given = {name: placed(t, dtype) for name, t in tensors.items()}
    exact = reference(**{name: t.double() for name, t in given.items()}, **arguments)
    eager = reference(**given, **arguments)
    actual = kernel(**given, **arguments)
    assert actual.dtype == eager.dtype
    assert relative_rms(actual, exact) <= bound(dtype, eager, exact)


# --- Attention -----------------------------------------------------------------------------------------------------

# Below, at and above the tiles (16 and 64 rows; 64 and 128 keys), the window, the extent; sizes apart from powers of 2.
ATTENTION = {
    "prefill": ({"T": 13}, {"offsets": [0, 0]}),
    "prefill, several tiles": ({"T": 45, "G": 1, "d": 16, "X": 33}, {"offsets": [0, 0]}),
    "prefill, one query": ({"T": 1}, {"offsets": [0, 0]}),
    "prefill, one head a group": ({"T": 35, "H": 3}, {"offsets": [0, 0]}),
    "sliding": ({"T": 41}, {"offsets": [0, 0], "window": 9}),
    "sliding, window above T": ({"T": 7, "X": 19}, {"offsets": [0, 0], "window": 19}),
    "sliding, window of one": ({"T": 5, "X": 1}, {"offsets": [0, 0], "window": 1}),
    "window above extent": ({"T": 40}, {"offsets": [0, 0], "window": 12}),
    "window below extent": ({"T": 40}, {"offsets": [0, 0], "window": 5}),
    "chunk": ({"T": 37, "S": 120}, {"offsets": [83, 83]}),
    "chunk, sliding": ({"T": 37, "S": 60}, {"offsets": [23, 23], "window": 9}),
    "chunks of unequal rows": ({"T": 11, "S": 90}, {"offsets": [79, 30], "first_keys": [0, 3]}),
    "decode": ({"T": 1, "S": 301}, {"offsets": [300, 300]}),
    "decode, extent of a tile": ({"T": 1, "S": 257, "X": 128}, {"offsets": [256, 256]}),
    "decode, short": ({"T": 1, "S": 3}, {"offsets": [2, 2]}),
    "decode, unequal rows": ({"T": 1, "S": 301}, {"offsets": [300, 4], "first_keys": [7, 0]}),
    "decode, sliding": ({"T": 1, "S": 30}, {"offsets": [29, 20], "first_keys": [0, 18], "window": 9}),
    "decode, no bias reaches the first splits": ({"T": 1, "S": 530, "X": 3}, {"offsets": [529, 529]}),
    "verify 2": ({"T": 2, "S": 200}, {"offsets": [198, 198]}),
    "verify 8": ({"T": 8, "S": 261, "X": 70}, {"offsets": [253, 253]}),
    "verify 8, unequal rows": ({"T": 8, "S": 261}, {"offsets": [253, 0]}),
    "no key visible": ({"T": 3, "S": 20}, {"offsets": [17, 2], "first_keys": [0, 9]}),
    "released head": ({"T": 5, "H": 6, "G": 1, "d": 128, "R": 16, "S": 100, "X": 64}, {"offsets": [95, 95]}),
}


@dtypes
@pytest.mark.parametrize(("sizes", "arguments"), ATTENTION.values(), ids=ATTENTION)
def test_attend(sizes, arguments, dtype):
    check(attention_kernel.attend, attention.attend, operands(**sizes), dtype, **arguments)


def test_attend_packed_documents():
    ids = torch.tensor([[0] * 20 + [1] * 13 + [2] * 8, [0] * 41], device=DEVICE)
    tensors = operands(T=41)
    for window in (None, 9):
        arguments = {"offsets": [0, 0], "window": window, "document_ids": ids}
        check(attention_kernel.attend, attention.attend, tensors, torch.float32, **arguments)


SPLITS = {
    "1 split": (16, 16, 1, 2), "5 splits": (16, 16, 5, 2), "7 splits, near keys weigh 3": (16, 32, 7, 3),
    "more splits than steps": (16, 16, 23, 1),
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 9], ids=["full", "sliding"])
@pytest.mark.parametrize(("rows", "keys", "splits", "weight"), SPLITS.values(), ids=SPLITS)
def test_attend_splits(rows, keys, splits, weight, window):
    tile = attention_kernel.Tile(rows, keys, splits, 1, 1, 1, weight)
    tensors, arguments = operands(T=3, S=91, X=40), {"offsets": [88, 50], "window": window}

    def tiled(**kwargs):
        return attention_kernel.attend_tiled(tile, **kwargs)

    check(tiled, attention.attend, tensors, torch.float32, **arguments)


def test_attend_reads_no_dead_slot():
    # Slots before a row's first key and past its last hold NaN; in the reference they would spoil the sums (0 NaN).
    tensors = operands(T=2, S=140)
    offsets, first_keys = [138, 60], [0, 11]
    exact = attention.attend(**tensors, offsets=offsets, first_keys=first_keys)
    given = {name: placed(t, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        given[name][1, :, :11] = given[name][1, :, 62:] = math.nan
    actual = attention_kernel.attend(**given, offsets=offsets, first_keys=first_keys)
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_reads_views_of_a_cache():
    tensors = operands(T=2, S=50)
    exact = attention.attend(**tensors, offsets=[48, 48])
    given = {name: t.to(DEVICE, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        capacity = torch.full((2, 3, 77, 5), math.nan, device=DEVICE)
        capacity[:, :, :50] = given[name]
        given[name] = capacity[:, :, :50]
    actual = attention_kernel.attend(**given, offsets=[48, 48])
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_follows_a_changed_profile():
    # P is kept transposed; a step of training, or a load, must not leave the old one in use.
    tensors = {name: t.to(DEVICE, torch.float32) for name, t in operands(T=5).items()}
    attention_kernel.attend(**tensors, offsets=[0, 0])
    tensors["profiles"].mul_(-2)
    actual = attention_kernel.attend(**tensors, offsets=[0, 0])
    assert relative_rms(actual, attention.attend(**tensors, offsets=[0, 0])) < 2e-6


# --- Residual mixture ----------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("n", [1, 2, 9], ids="{} sources".format)
@pytest.mark.parametrize("D", [37, 576], ids="D {}".format)
@pytest.mark.parametrize("queries", [None, 1, 3], ids=["unmixed", "1 query", "3 queries"])
def test_mix_and_norm(queries, D, n, dtype):
    count = queries or 2
    sources = placed(3 * torch.randn(2, 3, n, D), dtype)
    weights = [placed(torch.randn(D), dtype) for _ in range(count)]
    q = None if queries is None else placed(1.5 * torch.randn(*([count] if count > 1 else []), D), torch.float32)
    wide_q = None if q is None else q.double()
    exact = residual.mix_and_norm(sources.double(), wide_q, [w.double() for w in weights], 1e-5, torch.float64)
    eager = residual.mix_and_norm(sources, q, weights, 1e-5, dtype)
    actual = residual_kernel.mix_and_norm(sources, q, weights, 1e-5, dtype)
    assert len(actual) == count
    for a, b, c in zip(actual, exact, eager, strict=True):
        assert a.dtype == dtype
        assert relative_rms(a, b) <= bound(dtype, c, b)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mix_and_norm_rounds_wide_sources(dtype):
    # As the model calls it: float32 sources of a 16-bit model.
    D = 4608
    sources, q = placed(torch.randn(1, 2, 4, D), torch.float32), placed(torch.randn(D), torch.float32)
    w = placed(torch.randn(D), dtype)
    (actual,) = residual_kernel.mix_and_norm(sources, q, [w], 1e-6, dtype)
    (exact,) = residual.mix_and_norm(sources.double(), q.double(), [w.double()], 1e-6, torch.float64)
    assert actual.dtype == dtype
    assert relative_rms(actual, exact) <= torch.finfo(dtype).eps / 2


# --- Short convolutions --------------------------------------------------------------------------------------------

CONVOLUTIONS = {  # B, T, C, G, K
    "decode": (3, 1, 10, 5, 4), "below a run": (2, 7, 96, 3, 4), "a run and one more": (1, 17, 530, 2, 4),
    "two runs, K 3": (2, 32, 15, 3, 3), "released width": (1, 2, 4608, 9, 4),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(("B", "T", "C", "G", "K"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(B, T, C, G, K, documents, dtype):
    position = torch.arange(T, device=DEVICE).remainder(5).expand(B, T) if documents else None
    u = torch.randn(B, T + K - 1, C)
    static = {"u": u, "weight": torch.randn(C, 1, K)}
    check(short_conv_kernel.short_conv, short_conv.short_conv, static, dtype, document_position=position)
    dynamic = {"u": u, "dynamic_taps": torch.randn(B, T, G, K), "static": torch.randn(K, C)}
    check(
        short_conv_kernel.dynamic_short_conv, short_conv.dynamic_short_conv, dynamic, dtype, document_position=position
    )


def test_convolution_reads_the_end_of_a_state():
    # `with_history` gives a slice of the rolling state.
    state = torch.randn(2, 40, 11, device=DEVICE)
    weight = torch.randn(11, 1, 4, device=DEVICE)
    actual = short_conv_kernel.short_conv(state[:, 30:], weight)
    assert relative_rms(actual, short_conv.short_conv(state[:, 30:].double(), weight.double())) < 1e-6


# --- Router and SwiGLU ---------------------------------------------------------------------------------------------

ROUTERS = {  # N, D, E, k
    "one token": (1, 96, 24, 3), "few tokens": (16, 37, 11, 4), "more tokens": (17, 37, 130, 5),
    "two tiles": (131, 20, 384, 8), "all experts": (5, 9, 7, 7),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize(("N", "D", "E", "k"), ROUTERS.values(), ids=ROUTERS)
def test_route(N, D, E, k, dtype):
    normalize = N != 16  # both ways, in turn
    h = placed(torch.randn(N, D), dtype)
    weight, bias = (placed(t, torch.float32) for t in (torch.randn(E, D) / math.sqrt(D), 0.1 * torch.randn(E)))
    weights, ids = moe_kernel.route(h, weight, bias, k, 2.5, normalize)
    exact_weights, exact_ids = moe.route(h.double(), weight.double(), bias.double(), k, 2.5, normalize)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, exact_ids)
    assert weights.dtype == torch.float32
    assert relative_rms(weights, exact_weights) < 2e-6


@pytest.mark.parametrize("N", [6, 30])
def test_route_gives_ties_to_the_lower_id(N):
    h, bias = torch.randn(N, 13, device=DEVICE), torch.zeros(23, device=DEVICE)
    weight = torch.randn(23, 13, device=DEVICE)[[i % 5 for i in range(23)]]  # every score stands there 4 or 5 times
    _, ids = moe_kernel.route(h, weight, bias, 9, 1.0)
    assert torch.equal(ids, moe.route(h, weight, bias, 9, 1.0)[1])


def test_route_of_nan_and_negative_scores():
    h = torch.randn(20, 13, device=DEVICE)
    h[3], h[5, 2] = math.nan, math.nan
    weight, bias = torch.randn(11, 13, device=DEVICE), torch.linspace(-3, 0.5, 11, device=DEVICE)
    bias[4] = -math.inf
    _, ids = moe_kernel.route(h, weight, bias, 11, 1.0)
    assert torch.equal(ids, moe.route(h, weight, bias, 11, 1.0)[1])


def test_three_bfloat16_terms_are_the_weight():
    weight = torch.randn(7, 999)
    terms = moe_kernel.bfloat16_terms(weight)
    assert terms.dtype == torch.bfloat16
    assert torch.equal(terms.double().sum(0), weight.double())


def test_route_sums_its_terms(monkeypatch):
    # The path of bfloat16, in float32, so that the interpreter can run it.
    monkeypatch.setattr(moe_kernel, "_one_term", lambda weight: moe_kernel.bfloat16_terms(weight).float())
    h, weight, bias = (torch.randn(s, device=DEVICE) for s in ((21, 70), (12, 70), (12,)))
    weights, ids = moe_kernel.route(h, weight, bias, 3, 1.0)
    exact_weights, exact_ids = moe.route(h.double(), weight.double(), bias.double(), 3, 1.0)
    assert torch.equal(ids, exact_ids)
    assert relative_rms(weights, exact_weights) < 2e-6


@dtypes
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("N", "I"), [(1, 5), (7, 129), (3, 1024)], ids=str)
def test_softcapped_swiglu(N, I, scale, dtype):
    tensors = {"gate_up": scale * torch.randn(N, 2 * I)}
    check(moe_kernel.softcapped_swiglu, moe.softcapped_swiglu, tensors, dtype, gate_cap=4.0, up_cap=25.0)


# --- The whole model -----------------------------------------------------------------------------------------------


def model_logits(backend, dtype):
    """Prefill of two unequal rows, decoding, verification of four drafts, packed documents."""
    model = random_model(dtype=dtype, backend=backend).to(DEVICE)
    ids, mask = random_ids(2, 9).to(DEVICE), torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[1, 6:] = False
    cache = model.new_cache(2)
    out = [model(ids, cache=cache, attention_mask=mask).logits]
    for T in (1, 4):
        out.append(model(random_ids(2, T, seed=T).to(DEVICE), cache=cache).logits)
    documents = torch.tensor([[0] * 4 + [1] * 5], device=DEVICE)
    out.append(model(ids[:1], document_ids=documents).logits)
    return torch.cat([logits.flatten() for logits in out])


def test_model():
    dtype = DTYPES[-1]
    with torch.inference_mode():
        exact = model_logits("torch", torch.float64)
        eager = model_logits("torch", dtype)
        actual = model_logits(triton_backend(), dtype)
    assert relative_rms(actual, exact) <= 1.5 * relative_rms(eager, exact)


def test_backend_reports_what_stays_in_torch():
    report = triton_backend().report()
    assert report.pop("experts") == "inkling_ref.moe.experts"
    assert all(place.startswith("inkling_ref.kernels.") for place in report.values())


# --- What is refused -----------------------------------------------------------------------------------------------


def test_refuses_float64():
    with pytest.raises(InputError, match=r"triton softcapped_swiglu: torch.float64, expected float32"):
        moe_kernel.softcapped_swiglu(torch.zeros(2, 4, dtype=torch.float64, device=DEVICE), 4.0, 25.0)


def test_refuses_gradients():
    x = torch.zeros(2, 4, device=DEVICE, requires_grad=True)
    with pytest.raises(InputError, match="no backward pass"):
        moe_kernel.softcapped_swiglu(x, 4.0, 25.0)
    with torch.inference_mode():
        moe_kernel.softcapped_swiglu(x, 4.0, 25.0)
