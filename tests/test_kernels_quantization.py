"""Contract of the quantisers: the bytes of the reference, on every kind of input.

In the interpreter an inline assembly cannot run: its text is executed here, instruction by instruction.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import random_model, unchecked
from kernel_contract import DEVICE, INTERPRETED, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

import inkling_ref as ir
from inkling_ref import quantization as reference
from inkling_ref.backends import Backend
from inkling_ref.errors import InputError
from inkling_ref.kernels import processors
from inkling_ref.kernels import quantization as kernel
from inkling_ref.kernels.backend import triton_backend
from inkling_ref.measure.bench import harness
from inkling_ref.measure.bench import quantization as bench

E2M1_BOUNDS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # between neighbouring codes
E4M3_BOUNDS = [1 + (2 * i + 1) / 16 for i in range(8)]  # of one binade
gpu_only = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no GPU")
formats = pytest.mark.parametrize("quantisation", [reference.NVFP4, reference.MXFP8])


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(t):
    return t.contiguous().view(-1).view(torch.uint8)


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert same_bits(one, other)


def assert_nvfp4(w, denominator=reference.DENOMINATOR):
    assert_same(kernel.nvfp4_quantize(w, denominator), reference.nvfp4_quantize(w, denominator))


def every_bfloat16(binades, largest):
    """All finite bfloat16 of magnitudes up to `largest`, in experts of so many binades each, shuffled, as float32."""
    patterns = (torch.arange(2**16) << 16).to(torch.int32).view(torch.float32)
    patterns = patterns[patterns.abs() <= largest]
    patterns = patterns[patterns.abs().argsort(stable=True)]
    size = binades * 256
    experts = patterns[: len(patterns) // size * size].view(-1, size)
    rest = patterns[-size:][None]  # some a second time
    order = torch.rand(len(experts) + 1, size).argsort(-1)
    return torch.cat([experts, rest]).gather(1, order).view(-1, 2 * binades, 128)


# ---------------------------------------------------------------- NVFP4


@needs_device
@dtypes
@pytest.mark.parametrize(("E", "N", "K"), [(1, 1, 16), (3, 5, 80), (2, 37, 48)], ids=str)
def test_nvfp4(E, N, K, dtype):
    assert_nvfp4(placed(0.02 * torch.randn(E, N, K), dtype))


@needs_device
@pytest.mark.parametrize("denominator", [1536.0, 1536.1, 3e4, 0.3, 1e-20, 1e30])
def test_nvfp4_denominators(denominator):
    assert_nvfp4(placed(1e-3 * torch.randn(2, 7, 96)), denominator)


@needs_device
def test_nvfp4_of_every_bfloat16():
    w = every_bfloat16(16, reference.nvfp4_limit(reference.DENOMINATOR, ""))
    assert w.unique().numel() > 62_000  # the rest is too large
    assert_nvfp4(placed(w, torch.float32 if INTERPRETED else torch.bfloat16))


@needs_device
def test_nvfp4_special_blocks():
    w = torch.randn(5, 6, 64).unflatten(-1, (4, 16))
    w[0] *= 2.0 ** -torch.arange(24.0).view(6, 4, 1)  # down to scales that are subnormal, then zero
    w[1] = 0
    w[1, ::2] = -0.0
    w[2, 1], w[2, 2, 1:], w[2, 3, :, ::2] = 0, -0.0, 0  # zero blocks in others; a value and zeros
    w[3] = torch.tensor([*E2M1_BOUNDS, 6.0] * 2) * torch.randn(6, 4, 1).sign()  # ties, and errors that are equal
    w[3, :, :, 7] *= 2.0 ** torch.arange(6.0)[:, None]
    w[4] = torch.randn(6, 4, 16).sign() * torch.tensor([1e-45, 1e-42, 1e-38, 3e-38])[:, None]
    assert_nvfp4(placed(w.flatten(-2)))
    for scale in (1e-30, 1e30, 2.0**-126):
        assert_nvfp4(placed(w.flatten(-2)[[0, 3]] * scale))


@needs_device
def test_nvfp4_next_to_the_bounds_of_codes():
    """Where a quotient that is wrong in its last bit would show, in experts of ordinary and of extreme sizes."""
    sizes = 2.0 ** torch.tensor([0, 20, -20, 61, -61, 98, -98, 110])
    blocks = (0.3 + 0.6 * torch.rand(8, 48, 16)) * sizes[:, None, None]
    blocks[:, 0, 0] = amax = 1.1 * sizes
    for block in range(1, 48):
        target = (6.0, 4.0)[block % 2]
        largest, outer = blocks[:, block, :1], torch.tensor(reference.DENOMINATOR)
        blocks[:, block, 1:] = 0  # the first one decides about the scale
        _, scale = reference._nvfp4_round(blocks[:, block], amax[:, None], outer, target)
        unit = scale * (amax[:, None] / outer)
        bounds = torch.tensor([b for b in E2M1_BOUNDS if b < target])[torch.randint(0, 6, (15,)) % (6 - block % 2)]
        near = (unit * bounds).view(torch.int32) + torch.randint(-1, 2, (8, 15), dtype=torch.int32)
        blocks[:, block, 1:] = torch.minimum(near.view(torch.float32), largest)
    assert_nvfp4(placed(blocks))


@needs_device
def test_nvfp4_scales_that_are_subnormal():
    """For the target 6 they are rounded down so far that a block's largest value, about 8, saturates."""
    w = torch.randn(3, 40, 16)
    w /= w.abs().amax(-1, keepdim=True)
    w[:, 1:] *= 6 / 2688 * 2.0**-9 * (1.2 + 0.25 * torch.rand(3, 39, 1))
    _, scales = reference.nvfp4_encode(w, w.abs().amax((1, 2)))
    assert (scales[:, 1:].float() * 2**9).aminmax().max == 2
    assert_nvfp4(placed(w))


@needs_device
def test_nvfp4_where_six_and_four_are_almost_equally_good():
    """Two neighbouring floats between which the choice turns, found by bisection, in each of many blocks."""

    def takes_four(x):
        w[:, 1:, 5] = x
        return reference._four_over_six(w.view(1, -1, 16), reference.DENOMINATOR)[0][0, 1:, 0].abs().amax(-1) == 4

    w = torch.randn(1, 600, 16)
    w[0, 0, 3] = 6.0  # the expert's maximum, whatever the others are
    low, high = torch.full((599,), 0.01), torch.full((599,), 1.4)
    first, last = takes_four(low), takes_four(high)
    while ((high.view(torch.int32) - low.view(torch.int32)) > 1).any():
        middle = ((high.view(torch.int32) + low.view(torch.int32)) // 2).view(torch.float32)
        same = takes_four(middle) == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    assert (first != last).sum() > 50
    for x in (low, high):
        w[:, 1:, 5] = x
        assert_nvfp4(placed(w.view(1, 40, 240)))
    # Each in an expert of its own, lest a tie elsewhere decides that it is done literally.
    turning = (1 + (first != last).nonzero().flatten())[:12]
    w[:, turning[::2], 5] = low[turning[::2] - 1]
    alone = torch.stack([w[0, [0, i]].flatten() for i in turning])[:, None]
    assert_nvfp4(placed(alone))


@needs_device
def test_known_maxima_save_a_pass():
    w, amax = placed(torch.randn(3, 7, 32)), torch.tensor([7.0, 6.5, 9.1], device=DEVICE)
    w[:, 6, 31] = amax
    assert_same(kernel.nvfp4_encode(w, amax, 2000.0), reference.nvfp4_encode(w, amax, 2000.0))
    amax = amax / 3  # larger weights saturate
    assert_same(kernel.nvfp4_encode(w, amax, 2000.0), reference.nvfp4_encode(w, amax, 2000.0))


@gpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_weights(dtype):
    for E, N, K in ((3, 4608, 4608), (11, 977, 4624), (1, 3, 2**20)):
        w = torch.empty(E, N, K, dtype=dtype, device=DEVICE).normal_(std=0.015)
        w *= torch.exp2(-6 * torch.rand(E, N, 1, device=DEVICE)).to(dtype)
        for denominator in (2688.0, 1536.0):
            assert_nvfp4(w, denominator)
        if K % 32 == 0:
            assert_same(kernel.mxfp8_quantize(w), reference.mxfp8_quantize(w))


@gpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_may_be_views(dtype):
    memory = torch.randn(3 * 9 * 64 + 1, device=DEVICE).to(dtype)
    for w in (memory[1:].view(3, 9, 64), memory[:-1].view(3, 64, 9).mT, memory[:-1].view(3, 9, 64)[:, ::2]):
        assert_nvfp4(w)
        assert_same(kernel.mxfp8_quantize(w), reference.mxfp8_quantize(w))
        assert same_bits(kernel.fake_nvfp4(w), reference.fake_nvfp4(w))


# ---------------------------------------------------------------- what makes it quick


kernel_nearest, kernel_inverse, kernel_quotient, kernel_eight, kernel_at_scale = (
    kernel._nearest, kernel._inverse, kernel._quotient, kernel._eight, kernel._at_scale
)  # fmt: skip


@triton.jit
def nearest(x_ptr, out_ptr, LEAST: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, kernel_nearest(tl.load(x_ptr + i), LEAST, BITS))


@triton.jit
def quotients(x_ptr, u_ptr, q_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r, rest = kernel_inverse(tl.load(u_ptr + i))
    tl.store(q_ptr + i, kernel_quotient(tl.load(x_ptr + i), r, rest, False))


@triton.jit
def at_scale(x_ptr, scale_ptr, word_ptr, squares_ptr, outer, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, _ = kernel_eight(x_ptr, i * 16)
    y, _ = kernel_eight(x_ptr, i * 16 + 8)
    v, w, squares = kernel_at_scale(x, y, tl.load(scale_ptr + i), outer, False)
    tl.store(word_ptr + i * 2, v)
    tl.store(word_ptr + i * 2 + 1, w)
    tl.store(squares_ptr + i, squares * 4096)


@needs_device
@pytest.mark.parametrize("fmt", ["E2M1", "E4M3"])
def test_rounding_by_a_subtraction(fmt):
    """Next to every value of the grid and to every middle between two."""
    bits, least, most = (1, 0, 6.5) if fmt == "E2M1" else (3, -6, 460.0)
    binade = torch.arange(1, 2, 2.0 ** -(bits + 1))  # of one: values, and middles
    grid = torch.cat([(binade - 1) * 2.0**least, *(binade * 2.0**e for e in range(least, 9))])
    x = (grid[:, None].view(torch.int32) + torch.arange(-40, 41, dtype=torch.int32)).flatten().clamp(min=0)
    x = torch.cat([x.view(torch.float32), torch.rand(30_000) * most])
    x = torch.nn.functional.pad(x[x <= most], (0, 2**16))[: 2**16].to(DEVICE)
    out = torch.empty_like(x)
    nearest[(1,)](x, out, LEAST=2.0**least, BITS=bits, BLOCK=2**16, enable_fp_fusion=False)
    expected = (reference.e2m1_round if fmt == "E2M1" else reference.e4m3_round)(x)
    assert torch.equal(out.clamp(max=expected.amax().item()), expected)


@needs_device
@pytest.mark.parametrize("target", [6.0, 4.0])
def test_quick_codes_are_exact_and_quick_errors_as_near_as_promised(target):
    blocks = torch.randn(2048, 16) * torch.exp2(-3 * torch.rand(2048, 1))
    blocks[:512] = blocks[:512].bfloat16().float()
    blocks[512:, ::2] = blocks[512:, ::2].abs().amax(-1, keepdim=True) * torch.tensor([*E2M1_BOUNDS, 6.0]) / target
    blocks, amax, denominator = placed(blocks), torch.tensor(4.3, device=DEVICE), torch.tensor(2688.0, device=DEVICE)
    values, scale = reference._nvfp4_round(blocks, amax, denominator, target)
    error = (values * scale * amax / denominator - blocks) ** 2
    while (n := error.shape[-1]) > 1:
        error = error[..., : n // 2] + error[..., n // 2 :]
    words, squares = torch.empty(2048, 2, dtype=torch.int32, device=DEVICE), torch.empty(2048, device=DEVICE)
    outer = float(amax / denominator)
    at_scale[(1,)](blocks, scale, words, squares, outer, BLOCK=2048, enable_fp_fusion=False)
    assert torch.equal(words.view(torch.uint8), reference._pack_e2m1(values.abs()))
    exact = error[:, 0].double() * (denominator.double() / amax / scale[:, 0]) ** 2
    assert ((squares - exact).abs() <= 2.0**-16 * (squares + 0.5)).all()
    assert ((squares - exact).abs() > 2.0**-22 * squares).any()  # they do differ


def assert_same_side(u, bounds):
    """Of each bound, for every float x near bound * u."""
    for bound in bounds:
        near = (bound * u).view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32, device=u.device)
        x = near.view(torch.float32).flatten()
        q, divisor = torch.empty_like(x), u[:, None].expand(-1, 7).flatten()
        block = 2**14
        pad = (-len(x)) % block
        x, divisor = (torch.cat([t, t.new_ones(pad)]) for t in (x, divisor))
        q = torch.empty_like(x)
        quotients[(len(x) // block,)](x, divisor, q, BLOCK=block, enable_fp_fusion=False)
        assert torch.equal((q - bound).sign(), (x / divisor - bound).sign())


@needs_device
def test_quotients_by_two_floats_decide_as_division_does():
    """Where it could go wrong: divisors next to ones with a short mantissa."""
    short = torch.arange(2**23, 2**24, 2**20)[:, None] + torch.arange(-20, 21)
    u = short.clamp(2**23, 2**24 - 1).unique().to(torch.float32).to(DEVICE) * 2.0**-23
    assert_same_side(u, E2M1_BOUNDS + E4M3_BOUNDS)


@gpu_only
def test_quotients_by_two_floats_decide_as_division_does_for_all_divisors():
    for u in torch.arange(2**23, 2**24, device=DEVICE).float().mul(2.0**-23).split(2**20):
        assert_same_side(u, E2M1_BOUNDS[:4] + E4M3_BOUNDS)


@needs_device
def test_a_sixth():
    m = torch.arange(2**23, 2**24, 1 if not INTERPRETED else 61, device=DEVICE).float()
    m = m[: len(m) // 2**14 * 2**14]
    sixth, rest = kernel.SIXTH.value, kernel.SIXTH_REST.value
    exact = m.double() * sixth + (m * torch.tensor(rest, device=DEVICE)).double()
    assert torch.equal(exact.float(), m / torch.tensor(6.0, device=DEVICE))


# ---------------------------------------------------------------- assembly


def float_bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def rounded(bits, dtype, integers):
    """Floats, given by their bits, as bits of a smaller format."""
    return torch.from_numpy(bits.view(np.float32)).to(dtype).view(integers).numpy().astype(np.uint32)


def as_e4m3(bits):
    return rounded(float_bits(np.clip(bits.view(np.float32), -448, 448)), torch.float8_e4m3fn, torch.uint8)


def as_half(e4m3):
    return (
        torch.from_numpy(e4m3.astype(np.uint8))
        .view(torch.float8_e4m3fn)
        .half()
        .numpy()
        .view(np.uint16)
        .astype(np.uint32)
    )


def chosen_bytes(a, b, selector):
    both = a | b.astype(np.uint64) << np.uint64(32)
    return sum((both >> np.uint64(8 * (selector >> 4 * i & 7)) & np.uint64(255)) << np.uint64(8 * i) for i in range(4))


def larger_magnitudes(a, b):
    parts = [np.maximum(a >> s & 0x7FFF, b >> s & 0x7FFF) | (a ^ b) >> s & 0x8000 for s in (0, 16)]
    return parts[0] | parts[1] << 16


def fused(a, b, c):
    """Rounded once but for the last bit of a double: enough for what is computed here."""
    a, b, c = (t.view(np.float32).astype(np.float64) for t in (a, b, c))
    return float_bits((a * b + c).astype(np.float32))


INSTRUCTIONS = {
    "abs.f32": lambda a: a & 0x7FFFFFFF,
    "mul.rn.f32": lambda a, b: float_bits(a.view(np.float32) * b.view(np.float32)),
    "fma.rn.f32": fused,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": chosen_bytes,
    "mov.b32": lambda low, high: low | high << 16,
    "max.NaN.xorsign.abs.bf16x2": larger_magnitudes,
    "cvt.rn.satfinite.e4m3x2.f32": lambda high, low: as_e4m3(low) | as_e4m3(high) << 8,
    "cvt.rn.f16x2.e4m3x2": lambda a: as_half(a & 255) | as_half(a >> 8) << 16,
    "cvt.f32.f16": lambda a: float_bits(a.astype(np.uint16).view(np.float16).astype(np.float32)),
    "cvt.u32.u16": lambda a: a,
}  # fmt: skip


class Execution:
    """The results of an assembly text for arrays, in place of the interpreter's refusal."""

    def __init__(self, text, constraints, values, types, *_):
        from triton.runtime.interpreter import TensorHandle

        shape = np.broadcast_shapes(*(v.data.shape for v in values))
        registers = {
            f"${len(types) + i}": np.broadcast_to(v.data, shape).copy().view(np.uint32) for i, v in enumerate(values)
        }
        for line in re.sub(r"^{|}$", "", text.strip()).replace("\n", " ").split(";"):
            op, _, rest = line.strip().partition(" ")
            if op in ("", ".reg"):
                continue
            targets, *operands = re.findall(r"{[^}]*}|[^,{}\s]+", rest)
            names = [name for operand in operands for name in re.findall(r"[^,{}\s]+", operand)]
            sources = [registers[name] if name in registers else np.uint32(int(name, 0)) for name in names]
            if targets.startswith("{"):  # a register in two
                low, high = re.findall(r"[^,{}\s]+", targets)
                registers[low], registers[high] = sources[0] & 0xFFFF, sources[0] >> 16
            else:
                registers[targets] = np.asarray(INSTRUCTIONS[op](*sources)).astype(np.uint32)
        self.results = [
            TensorHandle(registers[f"${i}"].view(np.float32 if t.scalar == tl.float32 else np.int32), t.scalar)
            for i, t in enumerate(types)
        ]

    def get_result(self, i):
        return self.results[i]


@pytest.fixture
def assembly(monkeypatch):
    """The kernels as they run on a GPU, with bfloat16 for what the interpreter computes right: moving its bits."""
    if INTERPRETED:
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", Execution)
        monkeypatch.setattr(kernel, "_converts", lambda device: True)
        monkeypatch.setattr(kernel, "FLOATS", (*kernel.FLOATS, torch.bfloat16))


@needs_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("E", "N", "K"), [(1, 1, 16), (3, 5, 80), (2, 67, 192)], ids=str)
def test_nvfp4_in_assembly(E, N, K, dtype, assembly):
    w = (0.02 * torch.randn(E, N, K) * 2.0 ** -torch.randint(0, 12, (E, N, 1))).to(dtype).to(DEVICE)
    w[:, :, 3] *= 0
    for denominator in (2688.0, 1536.0):
        amax = w.float().abs().amax((1, 2))
        assert_same(kernel.nvfp4_encode(w, amax, denominator), reference.nvfp4_encode(w, amax, denominator))


@needs_device
@pytest.mark.parametrize(("E", "N", "K"), [(3, 37, 176), (1, 5, 208)], ids=str)
def test_nvfp4_by_as_many_blocks_at_a_time_as_on_a_gpu(E, N, K, assembly, monkeypatch):
    """Programs of several tiles, of which the last one overlaps its neighbour; a few blocks that are doubtful."""
    monkeypatch.setattr(kernel, "LANES", 32)
    monkeypatch.setattr(kernel, "PART", 2)
    w = 0.02 * torch.randn(E, N, K // 16, 16)
    w.flatten(1, 2)[:, 17::29] = 0.0
    w.flatten(1, 2)[:, 40::31] = torch.tensor([*E2M1_BOUNDS, 6.0] * 2) / 100
    w = w.flatten(2).bfloat16().to(DEVICE)
    amax = w.float().abs().amax((1, 2))
    assert_same(kernel.nvfp4_encode(w, amax), reference.nvfp4_encode(w, amax))


@needs_device
def test_programs_come_in_several_waves():
    wave = kernel.RESIDENT * processors(torch.device(DEVICE))
    sizes = [(1, 10 * wave, 2), (8, 10 * wave, 8), (3, 7 * wave // 2, 2), (1, 2 * wave, 1), (1, 1, 1)]
    for experts, matrix, expected in sizes:  # in tiles
        tiles = kernel._tiles(experts, matrix * kernel.LANES, torch.device(DEVICE))
        assert tiles == expected
        assert tiles == 1 or experts * matrix / tiles >= kernel.WAVES * wave


@needs_device
def test_nvfp4_of_bfloat16_at_the_bounds_of_codes(assembly):
    """Few mantissas: quotients are just at a bound, or rounded to it."""
    for largest in (171.0, 168.0, 252.0, 255.0):
        w = torch.tensor([*E2M1_BOUNDS, 6.0])[torch.randint(0, 8, (2, 16, 16, 16))] * torch.randn(2, 16, 16, 16).sign()
        w *= torch.randint(8, 16, (2, 16, 16, 1)) / 96 * largest
        w = w.flatten(-2).clamp(-largest, largest).bfloat16()
        w = (w.view(torch.int16) - torch.randint(0, 2, w.shape, dtype=torch.int16)).view(torch.bfloat16).to(DEVICE)
        w[:, 0, 0] = largest
        amax = torch.full((2,), largest, device=DEVICE)
        for denominator in (2688.0, 1536.0):
            assert_same(kernel.nvfp4_encode(w, amax, denominator), reference.nvfp4_encode(w, amax, denominator))


# ---------------------------------------------------------------- MXFP8


@needs_device
@dtypes
@pytest.mark.parametrize(("E", "N", "K"), [(1, 1, 32), (3, 5, 96), (2, 37, 64)], ids=str)
def test_mxfp8(E, N, K, dtype):
    w = placed(torch.randn(E, N, K) * 2.0 ** torch.randint(-9, 9, (E, N, 1)), dtype)
    assert_same(kernel.mxfp8_quantize(w), reference.mxfp8_quantize(w))


@needs_device
def test_mxfp8_of_every_bfloat16():
    w = placed(every_bfloat16(8, reference.FLOAT32_MAX), torch.float32 if INTERPRETED else torch.bfloat16)
    assert w.unique().numel() == 2**16 - 2 * 128 - 1  # infinities, NaN; both zeros are one
    assert_same(kernel.mxfp8_quantize(w), reference.mxfp8_quantize(w))


@needs_device
def test_mxfp8_special_blocks():
    w = torch.randn(2, 11, 32)
    w[0, 0], w[0, 1], w[0, 2, 1:] = 0, -0.0, 0
    w[0, 3] = torch.linspace(440, 520, 32)  # saturates
    w[0, 4:] *= torch.tensor([1e-45, 1e-40, 2.0**-126, 2.0**-119, 3e38 / 8, 1e30, 1e-20])[:, None]
    w[1] = (torch.arange(32 * 11).view(11, 32) + 0.5) * 2.0**-12  # ties on the coarse grids
    assert_same(kernel.mxfp8_quantize(placed(w)), reference.mxfp8_quantize(placed(w)))


# ---------------------------------------------------------------- activations

FAKES = {name: (getattr(kernel, name), getattr(reference, name)) for name in ("fake_nvfp4", "fake_mxfp8")}
fakes = pytest.mark.parametrize("fake", FAKES.values(), ids=FAKES)


@needs_device
@dtypes
@fakes
@pytest.mark.parametrize("shape", [(1, 32), (3, 5, 96), (7, 1120), (0, 64)], ids=str)
def test_activations(fake, shape, dtype):
    x = placed(torch.randn(shape), dtype)
    actual, expected = (function(x) for function in fake)
    assert same_bits(actual, expected)


@needs_device
@fakes
def test_activations_that_are_special(fake):
    x = torch.randn(13, 64)
    x[0], x[1], x[2, 1:], x[3, :32] = 0, -0.0, 0, 0
    x[4:9] *= torch.tensor([1e-45, 1e-40, 2.0**-120, 1e30, 3e38 / 8])[:, None]
    x[9] = torch.tensor([*E2M1_BOUNDS, 6.0] * 8)
    x[10, 5], x[11, 40], x[12, 3], x[12, 4] = torch.nan, -torch.inf, torch.nan, torch.inf
    x = placed(x)
    actual, expected = (function(x) for function in fake)
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert nan[10:].any(-1).all()
    assert same_bits(actual.nan_to_num(), expected.nan_to_num())


@gpu_only
@fakes
def test_large_activations(fake):
    for shape in ((8192, 4608), (65536, 2304)):
        x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        assert same_bits(*(function(x) for function in fake))


# ---------------------------------------------------------------- what is refused, and who uses it


@needs_device
@formats
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e35])
def test_values_without_a_code_are_refused_as_there(bad, quantisation):
    w = placed(torch.randn(3, 5, 64))
    w[1, 2, 3] = bad
    if bad == 3e35 and quantisation == reference.MXFP8:
        stored = (function(quantisation, w, "down") for function in (kernel.quantize_stored, reference.quantize_stored))
        assert_same(*(tensors.values() for tensors in stored))
        return
    messages = []
    for function in (kernel.quantize_stored, reference.quantize_stored):
        with pytest.raises(InputError, match=r"^down: expert 1 holds") as error:
            function(quantisation, w, "down")
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@needs_device
@formats
def test_what_has_no_encoding_is_refused(quantisation):
    with unchecked():
        with pytest.raises(InputError, match="up: a weight of shape"):
            kernel.quantize_stored(quantisation, torch.ones(2, 3, 40, device=DEVICE), "up")
        with pytest.raises(InputError, match="up: int32, expected a floating-point weight"):
            kernel.quantize_stored(quantisation, torch.ones(2, 3, 32, dtype=torch.int32, device=DEVICE), "up")
        with pytest.raises(InputError, match="float64, expected float32"):
            kernel.quantize_stored(quantisation, torch.ones(2, 3, 32, dtype=torch.float64, device=DEVICE))
        with pytest.raises(InputError, match="the last axis has 40 values"):
            getattr(kernel, f"fake_{quantisation}")(torch.ones(3, 40, device=DEVICE))
        with pytest.raises(InputError, match=r"nvfp4_encode: amax of shape \[3\], expected \[2\]"):
            kernel.nvfp4_encode(torch.ones(2, 3, 32, device=DEVICE), torch.ones(3, device=DEVICE))
        for encode in (lambda w: kernel.nvfp4_encode(w, w[:, 0, 0]), kernel.mxfp8_encode):
            with pytest.raises(InputError, match="the last axis has 40 values"):
                encode(torch.ones(2, 3, 40, device=DEVICE))
            with pytest.raises(InputError, match=r"w of shape \[0, 3, 32\], expected 3 axes, none empty"):
                encode(torch.ones(0, 3, 32, device=DEVICE))
    with pytest.raises(InputError, match=r"weight: denominator 0\.0, expected a positive number"):
        kernel.nvfp4_quantize(torch.ones(1, 2, 32, device=DEVICE), 0.0)


@needs_device
def test_saving_and_activations_take_the_kernels_of_the_backend(tmp_path):
    config = ir.InklingConfig.tiny()
    sizes = {"moe_intermediate_size": 64, "n_routed_experts": 3, "num_experts_per_tok": 2}  # whole blocks
    text = dataclasses.replace(config.text, **sizes)
    config = dataclasses.replace(config, text=text)
    called = []

    def spied(*args):
        called.append(args[0])
        return kernel.quantize_stored(*args)

    for name, backend in (
        ("kernels", dataclasses.replace(triton_backend(), quantize_stored=spied)),
        ("plain", Backend()),
    ):
        ir.save(random_model(config, backend=backend).to(DEVICE), tmp_path / name, experts="nvfp4+mxfp8")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("kernels", "plain")]
    assert files[0] == files[1]
    assert set(called) == {reference.NVFP4, reference.MXFP8}
    model = ir.load(tmp_path / "plain", backend=triton_backend(), experts="packed", dtype=torch.float32, device=DEVICE)
    found = [layer.mlp.experts.quantize for layer in model.quantize_activations().llm.layers]
    assert set(found) == {kernel.fake_nvfp4, kernel.fake_mxfp8}


@needs_device
def test_every_arm_of_the_benchmark_gives_the_bytes_of_the_reference(monkeypatch, capsys):
    """Here at small sizes and with a clock that stands still."""
    for name, value in {"D": 64, "I": 32, "EXPERTS": 2, "TOKENS": 3, "K_EXPERTS": 2}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench, "normal", lambda *shape, scale=1.0: placed(scale * torch.randn(shape)))
    monkeypatch.setattr(bench, "sets_of", lambda make: [make()])
    monkeypatch.setattr(harness, "graph_seconds", lambda calls: 1e-6)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = harness.Bench(prepare=True)
    run.prepare, run.copy, run.matrix = False, 1e12, 1e12
    bench.bench_quantization(run)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 * (2 * 2 + 2 + 2 * 2) + 2  # the copies
    assert {row.get("error") for row in rows} == {0.0}, [row for row in rows if row.get("error") != 0]
    known = next(row for row in rows if row["case"] == "NVFP4 2 x 64 x 64, known maxima")
    assert known["floor_us"] == pytest.approx(2 * 64 * 64 * 2.5625e-6)
