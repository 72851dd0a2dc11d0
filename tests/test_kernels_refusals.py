"""What the kernels refuse: nothing but these checks keeps a kernel from computing with foreign memory.

Every argument of every op is given a size too many and too few, an axis more, another dtype, another device and a
gradient; every size of every op is made 0. A call is refused, in one line, or it gives what the reference gives: there
the reference may not raise.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from helpers import relative_rms, unchecked
from kernel_contract import DEVICE, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import attention, fused, moe, residual, short_conv
from inkling_ref.dspark import MarkovHead
from inkling_ref.errors import InputError
from inkling_ref.kernels import attention as attention_kernel
from inkling_ref.kernels import decode, dspark, embedding, experts, head, projections, qkv
from inkling_ref.kernels import moe as moe_kernel
from inkling_ref.kernels import residual as residual_kernel
from inkling_ref.kernels import short_conv as short_conv_kernel
from inkling_ref.moe import ExpertMatrix

pytestmark = needs_device

# ---------------------------------------------------------------- every op, with tensors that go together


class Op(NamedTuple):
    """A kernel and its reference, called by `call` with tensors by name, whose axes are expressions in `sizes`."""

    kernel: object
    reference: object
    call: object
    sizes: dict[str, int]
    tensors: dict[str, str]
    dtypes: dict[str, torch.dtype] = {}  # noqa: RUF012 (of those that are not float32)
    empty: str = ""  # sizes that may be 0: there is nothing to compute


def plain(f, **given):
    return f(**given)


def with_norms(f, **given):
    weights = [given.pop(name) for name in NORMS]
    return f(**given, norm_weights=weights, eps=1e-5)


def mixed(f, **given):
    return with_norms(f, **given, dtype=torch.float32)


def joined(f, count=2, **given):
    return with_norms(f, **given, count=count, opens_block=True)


def listed(f, **given):
    return f([given["inputs[0]"], given["inputs[1]"]], [given["weights[0]"], given["weights[1]"]])


def prepared(f, **given):
    log_scaling = (4.0, 0.3) if "positions" in given else None
    return f(**given, qk_threshold=1.5, r_threshold=1.2, eps=1e-5, log_scaling=log_scaling)


def attended(f, offsets=(6, 4, 5), **given):
    return f(**given, offsets=list(offsets))


def by_experts(f, *, h, weights, ids, **parts):
    w13, w2 = (ExpertMatrix(*(t for name, t in parts.items() if name.startswith(which))) for which in ("w13", "w2"))
    return f(h, weights, ids, w13, w2, 4.0, 25.0)


def drafted(f, **given):
    torch.manual_seed(3)
    rnn = MarkovHead("rnn", HEAD["V"], HEAD["D"], 5).requires_grad_(False)
    return f(rnn if f is fused.draft_rnn else rnn.to(DEVICE), **given, temperature=0.7)


INT, INT32, BYTE, FLOAT8 = torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn
EXPERTS, ROUTES = {"N": 3, "D": 32, "I": 64, "E": 5, "k": 2}, {"h": "N D", "weights": "N k", "ids": "N k"}
HEAD = {"B": 3, "n": 2, "D": 11, "V": 17}
DEPTH = {"B": 3, "T": 2, "n": 4, "D": 37}
NORMS = "norm_weights[0]", "norm_weights[1]"
READERS = {"queries": "2 D"} | dict.fromkeys(NORMS, "D")
CONV = {"B": 3, "T": 3, "C": 6, "K": 4}
HEADS = {"B": 3, "T": 3, "H": 6, "G": 3, "S": 9, "d": 5, "R": 7}
PROJECTIONS = {
    "q": "B T H*d", "r": "B T H*R", "k": "B T G*d", "v": "B T G*d", "q_scale": "H d", "r_scale": "H R",
    "lengths": "B", "state": "B N 2*G*d", "rejected": "B",
}  # fmt: skip
INDICES = dict.fromkeys(("lengths", "rejected", "table", "positions", "document_position"), INT)
QUERIES = {"q": "B T H d", "r": "B T H R", "profiles": "R X", "sink": "B T H", "gate": "B T H*d"}
PAGES = {"keys": "P G S d", "values": "P G S d", "table": "B pages"}

OPS = {
    "route": Op(
        moe_kernel.route, moe.route, lambda f, k=3, **given: f(**given, k=k, scale=2.5), {"N": 5, "D": 13, "E": 7},
        {"h": "N D", "weight": "E D", "bias": "E"}, empty="N",
    ),
    "softcapped_swiglu": Op(
        moe_kernel.softcapped_swiglu, moe.softcapped_swiglu, lambda f, gate_up: f(gate_up, 4.0, 25.0),
        {"N": 3, "I": 5}, {"gate_up": "N 2*I"},
    ),
    "experts": Op(
        experts.experts, moe.experts, by_experts, EXPERTS, ROUTES | {"w13": "E 2*I D", "w2": "E D I"}, {"ids": INT},
        empty="N",
    ),
    "experts, MXFP8": Op(
        experts.experts, moe.experts, by_experts, EXPERTS,
        ROUTES | {"w13": "E 2*I D", "w13_scale": "E 2*I D//32", "w2": "E D I", "w2_scale": "E D I//32"},
        {"ids": INT, "w13": FLOAT8, "w13_scale": BYTE, "w2": FLOAT8, "w2_scale": BYTE}, empty="N",
    ),
    "experts, NVFP4": Op(
        experts.experts, moe.experts, by_experts, EXPERTS,
        ROUTES | {
            "w13": "E 2*I D//2", "w13_scale": "E 2*I D//16", "w13_amax": "E", "w13_denominator": "",
            "w2": "E D I//2", "w2_scale": "E D I//16", "w2_amax": "E", "w2_denominator": "",
        },
        {"ids": INT, "w13": BYTE, "w13_scale": FLOAT8, "w2": BYTE, "w2_scale": FLOAT8}, empty="N",
    ),
    "sample_head": Op(
        head.sample_head, fused.sample_head, lambda f, **given: f(**given, cap=30.0, temperature=0.7),
        {"N": 3, "D": 13, "V": 21}, {"hidden": "N D", "weight": "V D", "seeds": "N", "positions": "N"},
        {"seeds": INT, "positions": INT}, empty="N",
    ),
    "draft_rnn": Op(
        dspark.draft_rnn, fused.draft_rnn, drafted, HEAD,
        {"h": "B n D", "base": "B n V", "anchors": "B", "seeds": "B", "positions": "B n"},
        {"anchors": INT, "seeds": INT, "positions": INT}, empty="B",
    ),
    "mix_and_norm": Op(
        residual_kernel.mix_and_norm, residual.mix_and_norm, mixed, DEPTH, {"sources": "B T n D", **READERS}, empty="BT"
    ),
    "mix_depth_and_norm": Op(
        residual_kernel.mix_depth_and_norm, fused.mix_depth_and_norm, mixed, DEPTH,
        {"blocks": "B T n D", "partial": "B T D", **READERS}, empty="BTn",
    ),
    "join_and_mix": Op(
        residual_kernel.join_and_mix, fused.join_and_mix, joined, DEPTH | {"N": 5, "K": 4},
        {
            "y": "B T D", "state": "B N D", "weight": "D 1 K", "blocks": "B T n D", "partial": "B T D", "rejected": "B",
            **READERS,
        },
        INDICES, empty="B",
    ),
    "short_conv": Op(
        short_conv_kernel.short_conv, short_conv.short_conv, plain, CONV,
        {"u": "B T+K-1 C", "weight": "C 1 K", "document_position": "B T"}, INDICES, empty="B",
    ),
    "dynamic_short_conv": Op(
        short_conv_kernel.dynamic_short_conv, short_conv.dynamic_short_conv, plain, CONV | {"G": 3},
        {"u": "B T+K-1 C", "dynamic_taps": "B T G K", "static": "K C", "document_position": "B T"}, INDICES, empty="B",
    ),
    "rolling_short_conv": Op(
        short_conv_kernel.rolling_short_conv, fused.rolling_short_conv, plain, CONV | {"N": 5},
        {"x": "B T C", "state": "B N C", "weight": "C 1 K", "rejected": "B"}, INDICES, empty="B",
    ),
    "project": Op(
        projections.project, fused.project, listed, {"B": 2, "T": 3, "K": 7, "n": 5, "m": 4},
        {"inputs[0]": "B T K", "inputs[1]": "B T K", "weights[0]": "n K", "weights[1]": "m K"}, empty="BT",
    ),
    "embed_and_norm": Op(
        embedding.embed_and_norm, fused.embed_and_norm, with_norms, {"B": 3, "T": 2, "V": 5, "D": 9},
        {"ids": "B T", "table": "V D", "norm_weight": "D", "partial": "B T D", **dict.fromkeys(NORMS, "D")},
        {"ids": INT}, empty="BT",
    ),
    "prepare_qkv": Op(
        qkv.prepare_qkv, fused.prepare_qkv, prepared, HEADS | {"K": 4, "N": 5},
        PROJECTIONS | {
            "keys": "B G S d", "values": "B G S d", "k_taps": "G*d 1 K", "v_taps": "G*d 1 K", "document_position": "B T"
        },
        INDICES, empty="B",
    ),
    "prepare_qkv, full": Op(
        qkv.prepare_qkv, fused.prepare_qkv, prepared, HEADS | {"K": 4, "N": 5, "P": 9, "pages": 3},
        PROJECTIONS | PAGES | {
            "k_taps": "K G*d", "v_taps": "K G*d", "k_dynamic": "B T G K", "v_dynamic": "B T G K", "positions": "B T"
        },
        INDICES, empty="B",
    ),
    "attend": Op(
        attention_kernel.attend, attention.attend, attended, HEADS | {"X": 4},
        QUERIES | {"k": "B G S d", "v": "B G S d"},
    ),
    "attend, packed documents": Op(
        attention_kernel.attend, attention.attend, lambda f, **given: attended(f, (0, 0, 0), **given),
        HEADS | {"X": 4}, QUERIES | {"k": "B G T d", "v": "B G T d", "document_ids": "B T"}, {"document_ids": INT},
    ),
    "attend_cache": Op(
        decode.attend_cache, fused.attend_cache, plain, HEADS | {"X": 4},
        QUERIES | {"keys": "B G S d", "values": "B G S d", "lengths": "B"}, {"lengths": INT32},
    ),
    "attend_cache, pages": Op(
        decode.attend_cache, fused.attend_cache, plain, HEADS | {"X": 4, "S": 64, "P": 6, "pages": 2},
        QUERIES | PAGES | {"lengths": "B"}, {"lengths": INT32, "table": INT32},
    ),
}  # fmt: skip
each_op = pytest.mark.parametrize("name", OPS)


def letters_of(op):
    """How often each size stands in the table."""
    return Counter(re.findall(r"[A-Za-z]+", " ".join(op.tensors.values())))


def tensor_of(op, tensor, shape):
    """Numbers; the same for the same shape. Integers are 0, but for a table's, which name different pages."""
    dtype = op.dtypes.get(tensor, torch.float32)
    if tensor == "table":
        return torch.arange(math.prod(shape), dtype=dtype).view(shape)
    if dtype in (INT, INT32):
        return torch.zeros(shape, dtype=dtype)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(tensor)))
    return values.abs().to(dtype) if dtype in (BYTE, FLOAT8) else values


def valid(op, **changed):
    return {name: tensor_of(op, name, shape_of(op, name, **changed)) for name in op.tensors}


def shape_of(op, tensor, **changed):
    return tuple(eval(axis, {}, op.sizes | changed) for axis in op.tensors[tensor].split())


# ---------------------------------------------------------------- calls


def result(op, function, given, device):
    """What a call returns, and its tensors as they are afterwards."""
    given = {name: t.to(device, copy=True) if isinstance(t, torch.Tensor) else t for name, t in given.items()}
    with unchecked(), torch.inference_mode():
        out = op.call(function, **given)
    out = (*(out if isinstance(out, (tuple, list)) else [out]), *given.values())
    return [t.cpu() for t in out if isinstance(t, torch.Tensor)]


def refused(name, given):
    """Whether the kernel refuses the call, in a line that names the op; else it must do what the reference does."""
    op = OPS[name]
    try:
        actual = result(op, op.kernel, given, DEVICE)
    except InputError as error:
        line = str(error)
        assert re.fullmatch(rf"triton {name.split(',')[0]}: .+ expected .+", line), line
        return True
    # On the CPU: an index out of range on a GPU would end the whole process.
    for ours, theirs in zip(actual, result(op, op.reference, given, "cpu"), strict=True):
        assert ours.shape == theirs.shape
        if ours.is_floating_point() and ours.numel():
            assert relative_rms(ours.float(), theirs.float()) < 1e-5
        else:
            assert torch.equal(ours, theirs)
    return False


@each_op
def test_what_goes_together_is_taken(name):
    assert not refused(name, valid(OPS[name]))


@each_op
def test_a_size_off_by_one(name):
    op = OPS[name]
    shared = {letter for letter, count in letters_of(op).items() if count > 1}
    for tensor, letters in op.tensors.items():
        shape = shape_of(op, tensor)
        for axis, letter in enumerate(letters.split()):
            for step in (1, -1):
                if letter in shared or not letter.isalpha():
                    wrong = [n + step * (i == axis) for i, n in enumerate(shape)]
                    assert refused(name, valid(op) | {tensor: tensor_of(op, tensor, wrong)}), (tensor, letter)


@each_op
def test_an_empty_size(name):
    op = OPS[name]
    for letter in letters_of(op):
        assert refused(name, valid(op, **{letter: 0})) != (letter in op.empty), letter


@each_op
def test_another_number_of_axes_dtype_device_or_a_gradient(name):
    op = OPS[name]
    given = {tensor: t.to(DEVICE) for tensor, t in valid(op).items()}
    for tensor, right in given.items():
        changes = {"": right[None], "float64": right.double(), "meta": right.to("meta")}
        if right.dtype == torch.float32:
            changes["backward"] = right.clone().requires_grad_()
        argument = re.escape(tensor).replace("_", "[_.]")  # w13_scale is w13.scale
        for word, wrong in changes.items():
            message = rf"^triton [a-z_]+: {argument}(?!\w).*{word}.* expected "
            with unchecked(), pytest.raises(InputError, match=message):
                op.call(op.kernel, **given | {tensor: wrong})


OTHERS = {  # an op, its sizes, and other values
    "no expert chosen": ("route", {}, {"k": 0}),
    "more experts than there are": ("route", {}, {"k": 8}),
    "more logits than tokens": ("draft_rnn", {"V": 18}, {}),
    "fewer blocks than none": ("join_and_mix", {}, {"count": -1}),
    "no room for one more block": ("join_and_mix", {}, {"count": 4}),
    "a state without all inputs": ("rolling_short_conv", {"N": 2}, {}),
    "heads that do not divide": ("dynamic_short_conv", {"C": 7}, {}),
    "an odd column": ("softcapped_swiglu", {}, {"gate_up": torch.zeros(3, 5)}),
    "half a block of scales": ("experts, NVFP4", {"D": 40}, {}),
    "one offset for all rows": ("attend", {}, {"offsets": [6]}),
    "a first key too many": ("attend", {}, {"first_keys": [0, 0, 0, 0]}),
    "no window": ("attend_cache", {}, {"window": 0}),
    "nine tokens": ("attend_cache", {"T": 9}, {}),
    "pages of half a step": ("attend_cache, pages", {"S": 96}, {}),
    "more tokens than slots": ("prepare_qkv", {"T": 10}, {}),
    "more tokens than pages": ("prepare_qkv, full", {"T": 28}, {}),
    "dynamic taps of keys alone": ("prepare_qkv, full", {}, {"v_dynamic": None}),
}


@pytest.mark.parametrize(("name", "sizes", "values"), OTHERS.values(), ids=OTHERS)
def test_other_values(name, sizes, values):
    assert refused(name, valid(OPS[name], **sizes) | values)


ONE_ROW = {
    "short_conv": "document_position", "dynamic_short_conv": "document_position", "prepare_qkv": "document_position",
    "prepare_qkv, full": "positions", "attend, packed documents": "document_ids",
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor"), ONE_ROW.items(), ids=ONE_ROW)
def test_one_row_stands_for_all(name, tensor):
    assert not refused(name, valid(OPS[name]) | {tensor: torch.arange(3)[None] // 2})
