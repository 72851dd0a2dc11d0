"""Contract of the kernel between the projections and the attention."""

import math

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused
from inkling_ref.errors import InputError
from inkling_ref.kernels import qkv

pytestmark = needs_device

PAGE, PAGES = 8, 5  # a row's pages hold more slots than any case fills


def case(
    B, T, H, G, d, R, K=4, N=3, dynamic=False, given=True, shared=False, documents=False, pages=False, rejected=False
):
    """Floating inputs of one call, and its other arguments. A full layer has dynamic taps and log scaling."""
    width = G * d
    tensors = {
        "q": 2 * torch.randn(B, T, H * d), "r": torch.randn(B, T, H * R), "k": torch.randn(B, T, width),
        "v": torch.randn(B, T, width), "q_scale": torch.randn(H, d), "r_scale": torch.randn(H, R),
    }  # fmt: skip
    shape = (K, width) if dynamic else (width, 1, K)
    tensors |= {"k_taps": torch.randn(shape), "v_taps": torch.randn(shape)}
    if N:
        tensors["state"] = torch.randn(B, N, 2 * width)
    integers = {}
    if dynamic:
        tensors |= {"k_dynamic": torch.randn(B, T, G, K), "v_dynamic": torch.randn(B, T, G, K)}
        if given:
            integers["positions"] = torch.randint(0, 90, (1 if shared else B, T))
    if documents:
        integers["document_position"] = torch.arange(T).remainder(5).expand(B, T)
    if rejected:
        integers["rejected"] = torch.arange(B).remainder(N - K + 2)
    if N or pages:
        integers["lengths"] = torch.tensor([3, 0, -T, 7])[:B]  # the third row is not in use
    if pages:
        integers["table"] = torch.randperm(B * PAGES).view(B, PAGES).int()
    cache = (B * PAGES, G, PAGE, d) if pages else (B, G, PAGES * PAGE, d)
    # Thresholds in the middle of the norms: some vectors are clipped, some are not.
    settings = {"qk_threshold": 1.6 * math.sqrt(d), "r_threshold": math.sqrt(R), "eps": 1e-5}
    if dynamic:
        settings["log_scaling"] = (17.0, 0.3) if given else (2.0, 0.3)
    return tensors, {name: t.to(DEVICE) for name, t in integers.items()} | settings, cache


def outputs(function, tensors, arguments, cache, dtype):
    """Queries, relative states, keys, values, and the state afterwards; the caches hold NaN before."""
    given = {name: t.clone() for name, t in tensors.items()}
    caches = {name: torch.full(cache, math.nan, dtype=dtype, device=DEVICE) for name in ("keys", "values")}
    q, r = function(**given, **arguments, **caches)
    return {"q": q, "r": r, **caches, "state": given.get("state", q)}


def check_outputs(tensors, arguments, cache, dtype, **options):
    exact = outputs(fused.prepare_qkv, {n: t.double() for n, t in tensors.items()}, arguments, cache, torch.float64)
    eager = outputs(fused.prepare_qkv, tensors, arguments, cache, dtype)
    actual = outputs(qkv.prepare_qkv, tensors, arguments | options, cache, dtype)
    if "state" in tensors:
        assert torch.equal(actual.pop("state"), eager.pop("state"))  # moved, not computed
    for name, y in actual.items():
        written = ~exact[name].isnan()
        assert y.dtype == dtype, name
        assert torch.equal(~y.isnan(), written), name
        limit = bound(dtype, eager[name][written], exact[name][written])
        assert relative_rms(y[written], exact[name][written]) <= limit, name


CASES = {
    "sliding, one token": {"B": 3, "T": 1, "H": 6, "G": 3, "d": 10, "R": 7},
    "full, drafted tokens": {
        "B": 2, "T": 5, "H": 4, "G": 2, "d": 16, "R": 3, "N": 8, "dynamic": True, "rejected": True, "pages": True,
    },
    "full, slots are positions": {
        "B": 3, "T": 3, "H": 4, "G": 2, "d": 12, "R": 3, "N": 5, "dynamic": True, "given": False, "pages": True,
    },
    "sliding, rejected": {"B": 4, "T": 2, "H": 6, "G": 2, "d": 9, "R": 5, "K": 3, "N": 5, "rejected": True},
    "full, longer than a run": {"B": 1, "T": 37, "H": 6, "G": 2, "d": 16, "R": 4, "dynamic": True},
    "full, one position a column": {
        "B": 2, "T": 19, "H": 2, "G": 1, "d": 12, "R": 5, "K": 3, "N": 2, "dynamic": True, "shared": True,
        "pages": True,
    },
    "released head size, sliding": {"B": 2, "T": 1, "H": 12, "G": 2, "d": 128, "R": 16},
    "released head size, full": {"B": 1, "T": 18, "H": 6, "G": 2, "d": 128, "R": 16, "dynamic": True, "pages": True},
    "packed documents": {"B": 2, "T": 23, "H": 3, "G": 3, "d": 11, "R": 2, "N": 0, "documents": True},
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_prepare_qkv(sizes, dtype):
    tensors, arguments, cache = case(**sizes)
    check_outputs({name: placed(t, dtype) for name, t in tensors.items()}, arguments, cache, dtype)


def test_columns_of_one_projection():
    # The projections may be columns of one matrix product.
    tensors, arguments, cache = case(2, 3, 4, 2, 16, 5, dynamic=True)
    names = ("q", "r", "k", "v")
    fused_columns = torch.cat([tensors[name] for name in names], dim=-1).to(DEVICE)
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    sizes = [tensors[name].shape[-1] for name in names]
    tensors |= dict(zip(names, fused_columns.split(sizes, dim=-1), strict=True))
    check_outputs(tensors, arguments, cache, torch.float32)


def test_taps_of_two_dtypes():
    tensors, arguments, cache = case(2, 1, 4, 2, 16, 5)
    tensors = {name: placed(t, torch.float16 if name == "k_taps" else torch.float32) for name, t in tensors.items()}
    check_outputs(tensors, arguments, cache, torch.float32)


def test_documents_do_not_read_their_neighbours():
    # What stands before a document's start may be anything.
    tensors, arguments, cache = case(1, 7, 2, 1, 8, 3, N=0, documents=True)
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    expected = outputs(qkv.prepare_qkv, tensors, arguments, cache, torch.float32)
    tensors["k"][:, 2:5] = tensors["v"][:, 2:5] = math.nan  # the first document's end
    actual = outputs(qkv.prepare_qkv, tensors, arguments, cache, torch.float32)
    for name in ("keys", "values"):
        assert torch.equal(actual[name][:, :, 5:7], expected[name][:, :, 5:7])


def strided(t):
    """The same values, every other element in memory; NaN (integers: 99) between."""
    wide = torch.full((*t.shape, 2), math.nan if t.is_floating_point() else 99, dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


def test_strided_arguments_are_read():
    tensors, arguments, cache = case(3, 2, 4, 2, 8, 3, N=5, dynamic=True, pages=True, rejected=True)
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    expected = outputs(qkv.prepare_qkv, tensors, arguments, cache, torch.float32)
    strided_too = {n: strided(t) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    given = {n: t if n == "state" else strided(t) for n, t in tensors.items()}
    call, state = strided_too | given, given["state"].clone()
    caches = {name: torch.full(cache, math.nan, device=DEVICE) for name in ("keys", "values")}
    q, r = qkv.prepare_qkv(**call | {"state": state}, **caches)
    for name, y in {"q": q, "r": r, **caches, "state": state}.items():
        assert torch.equal(y.nan_to_num(7), expected[name].nan_to_num(7)), name


@pytest.mark.parametrize("name", ["keys", "values", "state"])
def test_strided_outputs_are_refused(name):
    tensors, arguments, cache = case(2, 1, 2, 1, 8, 3)
    given = {n: t.to(DEVICE) for n, t in tensors.items()}
    given |= {n: torch.zeros(cache, device=DEVICE) for n in ("keys", "values")}
    given[name] = strided(given[name])
    with pytest.raises(InputError, match=f"^triton prepare_qkv: .*{name} of channels 2 apart"):
        qkv.prepare_qkv(**given, **arguments)


REFUSED = {  # T, K, N and the message
    "more rows than tokens": (18, 4, 19, "a state of 19 rows, expected at most the call's 18 tokens"),
    "longer than a run": (17, 6, 5, "6 taps on a state, expected at most 5"),
}


@pytest.mark.parametrize(("T", "K", "N", "message"), REFUSED.values(), ids=REFUSED)
def test_a_state_is_refused(T, K, N, message):
    tensors, arguments, cache = case(1, T, 2, 1, 8, 3, K=K, N=N)
    tensors = {name: t.to(DEVICE) for name, t in tensors.items()}
    with pytest.raises(InputError, match=f"^triton prepare_qkv: {message}"):
        outputs(qkv.prepare_qkv, tensors, arguments, cache, torch.float32)
