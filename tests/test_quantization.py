"""NVFP4 and MXFP8: tables of all bytes, the quantiser's rules, part F of the cases, the golden blocks, round trips."""

import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.fx.experimental.proxy_tensor import make_fx

from inkling_ref import quantization as qt
from inkling_ref.errors import InputError

GOLDEN = Path(__file__).parent / "golden" / "text_mixed_precision" / "model.safetensors"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
E, N, K = 3, 5, 64  # K is a whole number of blocks of both formats


def weights(seed=0, shape=(E, N, K), scale=0.02):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def bits(x):
    return x.contiguous().view({4: torch.int32, 1: torch.uint8, 8: torch.int64}[x.element_size()])


def e4m3_by_hand(byte):
    """Sign, four exponent bits (bias 7), three mantissa bits; all ones is NaN, there is no infinity."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = math.nan if byte & 127 == 127 else value
    return -value if byte & 128 else value


def nvfp4_by_hand(w, denominator, targets=(6.0, 4.0)):
    """A scalar quantiser of one expert [N, K] in float32, written from the equations: (codes, scale bytes)."""
    f32 = lambda x: torch.tensor(x, dtype=torch.float32)  # noqa: E731
    scale_values = torch.tensor([e4m3_by_hand(byte) for byte in range(127)])
    amax, denominator = w.abs().max(), f32(denominator)
    codes, scales = [], []
    for row in w:
        for block in row.split(16):
            best = None
            for t in targets:
                wanted = torch.minimum(f32(448.0), block.abs().max() / f32(t) * denominator / amax)
                distance = (scale_values.double() - wanted.double()).abs()
                near = (distance == distance.min()).nonzero().flatten().tolist()
                byte = next(b for b in near if len(near) == 1 or b % 2 == 0)
                unit = scale_values[byte] * (amax / denominator)
                chosen = []
                for x in block:
                    ratio = (x / unit).abs().item() if unit > 0 else 0.0
                    near = sorted(range(8), key=lambda c: (abs(E2M1[c] - ratio), c % 2))[0]  # a tie: the even code
                    chosen.append(near + (8 if math.copysign(1, x.item()) < 0 else 0))
                decoded = torch.tensor([E2M1[c] for c in chosen]) * scale_values[byte] * amax / denominator
                error = (decoded - block) ** 2
                for half in (8, 4, 2, 1):
                    error = error[:half] + error[half : 2 * half]
                if best is None or error < best[0]:
                    best = (error, chosen, byte)
            codes += best[1]
            scales.append(best[2])
    return codes, scales


# ---------------------------------------------------------------- number formats


def test_case_34_all_e4m3_bytes():
    decoded = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    expected = torch.tensor([e4m3_by_hand(byte) for byte in range(256)])
    assert expected[1] == 2.0**-9
    assert expected[0x7E] == 448
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(decoded.nan_to_num(), expected.nan_to_num())
    # Every value encodes to its own byte, and everything above 448 saturates.
    finite = ~expected.isnan()
    assert torch.equal(bits(qt.e4m3_round(expected)[finite]), bits(expected[finite]))
    assert qt.e4m3_round(torch.tensor([449.0, 1e30, -1e30, math.inf])).tolist() == [448, 448, -448, 448]


def test_case_34_all_e8m0_bytes():
    decoded = qt.e8m0_value(torch.arange(256).to(torch.uint8))
    for byte in range(255):
        assert decoded[byte].item() == math.ldexp(1.0, byte - 127), byte
    assert decoded[255].isnan()
    assert bits(decoded)[0].item() == 0x00400000
    assert decoded[134] == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_case_34_weight_one_with_scale_byte_zero(dtype):
    values = torch.zeros(1, 1, 32).to(torch.float8_e4m3fn)
    values[0, 0, 0] = 1.0
    decoded = qt.mxfp8_dequantize(values, torch.zeros(1, 1, 1, dtype=torch.uint8), dtype)
    assert decoded[0, 0, 0].item() == 2.0**-127
    assert decoded[0, 0, 1:].eq(0).all()


@pytest.mark.parametrize("suffix", ["_scale", ""])
def test_case_34_nan_bytes_of_mxfp8_are_named(suffix):
    stored = qt.quantize_stored(qt.MXFP8, weights())
    stored[suffix].view(torch.uint8)[2, 1, 0] = 255
    with pytest.raises(InputError, match=rf"^here{suffix}: expert 2 holds a NaN"):
        qt.dequantize_stored(qt.MXFP8, stored, name="here")


def test_e2m1_rounds_to_nearest_and_ties_to_even_codes():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert qt.e2m1_round(x).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert qt.e2m1_round(-x).tolist() == [0, -1, -1, -2, -2, -4, -4]
    above, below = torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)
    assert qt.e2m1_round(above).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert qt.e2m1_round(below).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert qt.e2m1_round(torch.tensor([6.4, 1e30, -7.0])).tolist() == [6, 6, -6]


def test_e4m3_rounds_to_nearest_and_ties_to_even_mantissa():
    table = torch.tensor([e4m3_by_hand(byte) for byte in range(127)])
    middle = (table[1:] + table[:-1]) / 2
    even = torch.where(torch.arange(126) % 2 == 0, table[:-1], table[1:])
    assert torch.equal(qt.e4m3_round(middle), even)
    assert torch.equal(qt.e4m3_round(torch.nextafter(middle, middle + 1000)), table[1:])
    assert torch.equal(qt.e4m3_round(torch.nextafter(middle, middle - 1000)), table[:-1])


# ---------------------------------------------------------------- part F of the cases


def decode_bytes(packed, scale_byte=0x38, amax=2688.0, denominator=2688.0):
    codes = torch.tensor(packed, dtype=torch.uint8).reshape(1, 1, -1)
    scales = torch.full((1, 1, codes.shape[-1] // 8), scale_byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return qt.nvfp4_dequantize(codes, scales, torch.tensor([amax]), torch.tensor(denominator)).flatten()


def test_case_29_low_nibble_first():
    decoded = decode_bytes([0x21, 0x9F, 0x80, 0x08, 0, 0, 0, 0])
    assert decoded[:4].tolist() == [0.5, 1.0, -6.0, -0.5]
    assert decoded[4:].eq(0).all()  # code 8 is -0.0


def test_case_29_all_codes_in_both_nibbles():
    decoded = decode_bytes([c << 4 | (15 - c) for c in range(16)])
    assert decoded[1::2].tolist() == E2M1
    assert decoded[0::2].tolist() == E2M1[::-1]


def test_case_30_zero_blocks_and_zero_experts():
    w = weights()
    w[0, 1, 16:32] = 0
    w[1] = 0
    for quantisation in (qt.NVFP4, qt.MXFP8):
        if quantisation == qt.MXFP8:
            w[0, 1, 32:64] = 0
        stored = qt.quantize_stored(quantisation, w)
        decoded = qt.dequantize_stored(quantisation, stored)
        assert stored["_scale"].view(torch.uint8).max() <= 0x7E
        assert decoded.isfinite().all()
        assert decoded[w == 0].eq(0).all()
        assert decoded[0].abs().max() > 0
    codes, scales, amax, _ = qt.nvfp4_quantize(w)
    assert amax[1] == 0
    assert scales.view(torch.uint8)[1].eq(0).all()
    assert codes[1].eq(0).all()
    # amax 0 rules whatever the codes say
    assert qt.nvfp4_dequantize(codes, scales, torch.zeros(E), torch.tensor(2688.0)).eq(0).all()


@pytest.mark.parametrize("tiny", [1e-9, 1e-30, 1e-44])
def test_case_30_tiny_blocks_flush_to_zero(tiny):
    w = weights(scale=1.0)
    w[2, 3, 16:32] = tiny
    decoded = qt.nvfp4_dequantize(*qt.nvfp4_quantize(w))
    assert decoded.isfinite().all()
    assert decoded[2, 3, 16:32].eq(0).all()
    assert qt.mxfp8_dequantize(*qt.mxfp8_quantize(w)).isfinite().all()


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-20, 1e20, 1e34])
def test_case_30_extreme_experts_stay_finite(scale):
    w = weights(scale=1.0)
    w[1] *= scale
    for quantisation in (qt.NVFP4, qt.MXFP8):
        decoded = qt.dequantize_stored(quantisation, qt.quantize_stored(quantisation, w))
        assert decoded.isfinite().all()
        assert decoded[1].abs().max() <= 1.07 * w[1].abs().max()


def test_case_30_nan_scale_byte_is_named():
    stored = qt.quantize_stored(qt.NVFP4, weights())
    stored["_scale"].view(torch.uint8)[1, 4, 2] = 0x7F
    with pytest.raises(InputError, match=r"^layer 7 w2_scale: expert 1 holds a NaN"):
        qt.dequantize_stored(qt.NVFP4, stored, name="layer 7 w2")


@pytest.mark.parametrize("denominator", [1536.0, 2688.0])
def test_case_31_stored_denominator_rules(denominator):
    one = decode_bytes([0x02] + [0] * 7, amax=6.0, denominator=denominator)
    assert one[0].item() == struct.unpack("f", struct.pack("f", 6.0 / denominator))[0]


def test_case_31_division_not_reciprocal():
    amax, denominator = 0.078125, 1536.0
    decoded = decode_bytes([0x02] + [0] * 7, amax=amax, denominator=denominator)[0]
    assert decoded.item() == float.fromhex("0x1.aaaaaap-15")
    assert (torch.tensor(1.0) / denominator * amax).item() == float.fromhex("0x1.aaaaacp-15")  # what it must not be


@pytest.mark.parametrize("denominator", [0.0, -1536.0, math.nan, math.inf])
def test_case_31_bad_denominator_raises(denominator):
    with pytest.raises(InputError, match="denominator"):
        qt.nvfp4_quantize(weights(), denominator)
    codes, scales, amax, _ = qt.nvfp4_quantize(weights())
    with pytest.raises(InputError, match=r"_outer_scale_denominator: .*expected a positive number"):
        qt.nvfp4_dequantize(codes, scales, amax, torch.tensor(denominator))


@pytest.mark.parametrize("amax", [-1.0, math.nan, math.inf])
def test_case_31_bad_amax_raises(amax):
    codes, scales, good, denominator = qt.nvfp4_quantize(weights())
    good[2] = amax
    with pytest.raises(InputError, match="_amax: expert 2"):
        qt.nvfp4_dequantize(codes, scales, good, denominator)


def test_case_32_tie_keeps_six():
    w = torch.zeros(1, 1, 16)
    w[0, 0, :2] = torch.tensor([6.0, 3.0])
    codes, scales, amax, denominator = qt.nvfp4_quantize(w, 1536.0)
    assert (scales.view(torch.uint8).item(), codes[0, 0, 0].item()) == (0x78, 0x57)
    assert torch.equal(qt.nvfp4_dequantize(codes, scales, amax, denominator), w)
    values, scale = qt._nvfp4_round(w.view(1, 1, 1, 16), torch.tensor(6.0), torch.tensor(1536.0), 4.0)
    assert scale.to(torch.float8_e4m3fn).view(torch.uint8).item() == 0x7C
    assert qt._pack_e2m1(values.flatten(-2))[0, 0, 0].item() == 0x46
    assert torch.equal(values.flatten(-2) * scale[..., 0] * 6.0 / 1536.0, w)


@pytest.mark.parametrize(("columns", "scale_columns"), [(24, 2), (20, 2), (32, 3), (32, 1), (48, 2)])
def test_case_33_shapes_that_do_not_fit_are_named(columns, scale_columns):
    codes = torch.zeros(E, N, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(E, N, scale_columns).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"weight.*expected"):
        qt.nvfp4_dequantize(codes, scales, torch.ones(E), torch.tensor(2688.0))


@pytest.mark.parametrize("columns", [17, 24, 20, 8, 0])
@pytest.mark.parametrize("quantisation", [qt.NVFP4, qt.MXFP8])
def test_case_33_odd_widths_are_refused(columns, quantisation):
    with pytest.raises(InputError, match=f"up: .*{columns}.*multiple of {qt.GROUP[quantisation]}"):
        qt.quantize_stored(quantisation, torch.ones(E, N, columns), "up")
    if columns:
        fake = {qt.NVFP4: qt.fake_nvfp4, qt.MXFP8: qt.fake_mxfp8}[quantisation]
        with pytest.raises(InputError, match=f"{columns} values"):
            fake(torch.ones(N, columns))


def test_case_36_one_scale_per_row_and_32_columns():
    w = weights(shape=(2, 8, 64), scale=1.0) * torch.logspace(-3, 3, 8)[:, None]
    values, scales = qt.mxfp8_quantize(w)
    assert scales.shape == (2, 8, 2)
    assert scales.unique().numel() > 8  # rows differ in size, so a shared scale would not do
    with pytest.raises(InputError, match=r"weight_scale: uint8 \[2, 1, 2\], expected uint8 \[2, 8, 2\]"):
        qt.mxfp8_dequantize(values, scales[:, :1])


@pytest.mark.parametrize("wrong", ["_scale", "_amax", "_outer_scale_denominator", ""])
def test_wrong_dtypes_are_named(wrong):
    stored = qt.quantize_stored(qt.NVFP4, weights())
    stored[wrong] = stored[wrong].to(torch.int16)
    with pytest.raises(InputError, match=rf"^weight{wrong}: int16"):
        qt.dequantize_stored(qt.NVFP4, stored)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e35])
@pytest.mark.parametrize("quantisation", [qt.NVFP4, qt.MXFP8])
def test_values_without_a_code_are_refused(bad, quantisation):
    w = weights()
    w[1, 2, 3] = bad
    if bad == 3e35 and quantisation == qt.MXFP8:
        assert qt.dequantize_stored(quantisation, qt.quantize_stored(quantisation, w)).isfinite().all()
    else:
        with pytest.raises(InputError, match=r"^down: expert 1 holds"):
            qt.quantize_stored(quantisation, w, "down")


def test_integer_weights_are_refused():
    with pytest.raises(InputError, match="int32"):
        qt.nvfp4_quantize(torch.ones(E, N, K, dtype=torch.int32))


# ---------------------------------------------------------------- the quantiser


@pytest.mark.parametrize("denominator", [2688.0, 1536.0])
def test_nvfp4_equals_the_scalar_quantiser(denominator):
    w = weights(seed=5, shape=(2, 3, 48))
    w[0, 0, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * 2.0**-7  # ties
    codes, scales, amax, _ = qt.nvfp4_quantize(w, denominator)
    assert torch.equal(amax, w.abs().amax((1, 2)))
    for expert in range(2):
        expected_codes, expected_scales = nvfp4_by_hand(w[expert], denominator)
        nibbles = torch.stack((codes[expert] & 15, codes[expert] >> 4), -1).flatten().tolist()
        assert nibbles == expected_codes
        assert scales[expert].view(torch.uint8).flatten().tolist() == expected_scales


def test_four_over_six_uses_both_and_beats_six_alone():
    w = weights(shape=(E, 37, K))
    values, scales, amax, _ = qt._four_over_six(w, 2688.0)
    largest = values.abs().amax(-1)
    assert 0.2 < (largest == 4).float().mean() < 0.8
    assert set(largest.unique().tolist()) == {4.0, 6.0}
    a = amax[:, None, None, None]
    six, scale_six = qt._nvfp4_round(w.view(E, 37, -1, 16), a, torch.tensor(2688.0), 6.0)
    error = (values * scales * a / 2688 - w.view(E, 37, -1, 16)).square().sum(-1)
    error_six = (six * scale_six * a / 2688 - w.view(E, 37, -1, 16)).square().sum(-1)
    assert (error <= error_six).all()
    assert error.sum() < 0.95 * error_six.sum()


def test_mxfp8_exponent_and_saturation():
    for largest, exponent in [(1.0, -8), (1.75, -8), (1.999, -8), (2.0, -7), (448.0, 0), (511.0, 0), (512.0, 1)]:
        w = torch.zeros(1, 1, 32)
        w[0, 0, 7] = -largest
        values, scales = qt.mxfp8_quantize(w)
        assert scales.item() == exponent + 127, largest
        assert values[0, 0, 7].float() == max(-448.0, qt.e4m3_round(torch.tensor(-largest * 2.0**-exponent)))
    assert qt.mxfp8_quantize(torch.full((1, 1, 32), 2.0**-140))[1].item() == 0  # the smallest byte
    assert qt.mxfp8_quantize(torch.full((1, 1, 32), 3e38))[1].item() == 246


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_is_float32_for_every_dtype(dtype):
    w = weights(scale=1.0).to(dtype)
    for quantisation in (qt.NVFP4, qt.MXFP8):
        stored, expected = qt.quantize_stored(quantisation, w), qt.quantize_stored(quantisation, w.float())
        for suffix in expected:
            assert torch.equal(bits(stored[suffix]), bits(expected[suffix]))
        decoded = qt.dequantize_stored(quantisation, stored, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, qt.dequantize_stored(quantisation, stored).to(dtype))


def test_chunks_do_not_change_a_byte(monkeypatch):
    w = weights(shape=(7, N, K))
    whole = [qt.quantize_stored(q, w) for q in (qt.NVFP4, qt.MXFP8)]
    decoded = [qt.dequantize_stored(q, s) for q, s in zip((qt.NVFP4, qt.MXFP8), whole, strict=True)]
    monkeypatch.setattr(qt, "_CHUNK_WEIGHTS", 2 * N * K)  # 7 experts in chunks of 2, 2, 2, 1
    for quantisation, stored, values in zip((qt.NVFP4, qt.MXFP8), whole, decoded, strict=True):
        again = qt.quantize_stored(quantisation, w)
        assert all(torch.equal(bits(again[suffix]), bits(stored[suffix])) for suffix in stored)
        assert torch.equal(qt.dequantize_stored(quantisation, again), values)


# ---------------------------------------------------------------- golden


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN)


def golden_experts(golden, dtype):
    names = [n for n, t in golden.items() if n.endswith(("w13_weight", "w2_weight")) and t.dtype == dtype]
    assert names
    return {name: {k[len(name) :]: t for k, t in golden.items() if k.startswith(name)} for name in names}


def test_golden_nvfp4_blocks_are_a_candidate_of_six_or_four(golden):
    chosen = {6.0: 0, 4.0: 0}
    for name, stored in golden_experts(golden, torch.uint8).items():
        w = qt.dequantize_stored(qt.NVFP4, stored, name=name).unflatten(-1, (-1, 16))
        amax, denominator = stored["_amax"][:, None, None, None], stored["_outer_scale_denominator"]
        codes = stored[""].unflatten(-1, (-1, 8))
        explained = torch.zeros(codes.shape[:3], dtype=torch.bool)
        for target in chosen:
            values, scale = qt._nvfp4_round(w, amax, denominator, target)
            same = (qt._pack_e2m1(values) == codes).all(-1)
            same &= bits(scale.squeeze(-1).to(torch.float8_e4m3fn)) == bits(stored["_scale"])
            chosen[target] += int((same & ~explained).sum())
            explained |= same
        assert explained.all(), name
    assert min(chosen.values()) > 10000  # both were drawn


def test_golden_mxfp8_encodes_to_itself(golden):
    for name, stored in golden_experts(golden, torch.float8_e4m3fn).items():
        again = qt.quantize_stored(qt.MXFP8, qt.dequantize_stored(qt.MXFP8, stored, name=name))
        assert torch.equal(bits(again[""]), bits(stored[""])), name
        assert torch.equal(again["_scale"], stored["_scale"]), name


def test_golden_decode_by_table(golden):
    """The decoder against look-ups written out here, on every golden expert tensor."""
    table = torch.tensor(E2M1)
    for stored in golden_experts(golden, torch.uint8).values():
        codes = torch.stack((stored[""] & 15, stored[""] >> 4), -1).flatten(-2).long()
        unit = stored["_amax"] / stored["_outer_scale_denominator"]
        expected = table[codes] * stored["_scale"].float().repeat_interleave(16, -1) * unit[:, None, None]
        assert torch.equal(qt.dequantize_stored(qt.NVFP4, stored), expected)
    for stored in golden_experts(golden, torch.float8_e4m3fn).values():
        power = torch.tensor([2.0**e for e in range(-127, 128)])[stored["_scale"].long()]
        expected = stored[""].float() * power.repeat_interleave(32, -1)
        assert torch.equal(qt.dequantize_stored(qt.MXFP8, stored), expected)


# ---------------------------------------------------------------- round trips


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.floats(-30, 30),
    denominator=st.sampled_from([2688.0, 1536.0]),
    spread=st.floats(0, 8),
)
def test_nvfp4_error_is_bounded_and_a_second_pass_changes_nothing(seed, exponent, denominator, spread):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(2, 3, 32, generator=generator) * 2.0**exponent
    w = w * torch.exp2(-spread * torch.rand(2, 3, 1, generator=generator))
    stored = qt.nvfp4_quantize(w, denominator)
    decoded = qt.nvfp4_dequantize(*stored)
    blocks, error = w.unflatten(-1, (-1, 16)), (decoded - w).unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    # Half of the widest step (2 of 6) plus the rounding of the scale (1/16, or its subnormal step for small blocks).
    floor = 2.0**-10 * 6 * w.abs().amax((1, 2)) / denominator
    assert (error.abs() <= largest * (1 / 6 + 1 / 16) * 1.001 + floor[:, None, None, None]).all()
    again = qt.nvfp4_dequantize(*qt.nvfp4_quantize(decoded, denominator))
    assert (again - decoded).abs().max() <= 1e-6 * decoded.abs().max()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-60, 60))
def test_mxfp8_error_is_bounded_and_a_second_pass_changes_nothing(seed, exponent):
    w = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    stored = qt.mxfp8_quantize(w)
    decoded = qt.mxfp8_dequantize(*stored)
    largest = w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # Relative 1/16, or half a subnormal step, or the saturated top (448 of 512).
    bound = w.unflatten(-1, (-1, 32)).abs() / 16 + largest * 2.0**-18
    error = (decoded - w).unflatten(-1, (-1, 32)).abs()
    assert ((error <= bound) | (error <= largest / 8)).all()
    assert (error <= bound).float().mean() > 0.9
    again = qt.mxfp8_quantize(decoded)
    assert torch.equal(bits(again[0]), bits(stored[0]))
    assert torch.equal(again[1], stored[1])


@settings(max_examples=30, deadline=None)
@given(data=st.binary(min_size=2 * 3 * 16, max_size=2 * 3 * 16))
def test_any_bytes_of_codes_survive_unpack_and_pack(data):
    codes = torch.tensor(list(data), dtype=torch.uint8).view(2, 3, 16)
    assert torch.equal(qt._pack_e2m1(qt._unpack_e2m1(codes)), codes)


# ---------------------------------------------------------------- fake quantisation


@pytest.mark.parametrize("denominator", [2688.0, 1536.0])
def test_fake_weights_equal_the_stored_ones(denominator):
    w = weights()
    w[1] = 0
    stored = qt.nvfp4_quantize(w, denominator)
    assert torch.equal(qt.fake_nvfp4_weight(w, denominator), qt.nvfp4_dequantize(*stored))
    assert torch.equal(qt.fake_mxfp8_weight(w), qt.mxfp8_dequantize(*qt.mxfp8_quantize(w)))
    assert qt.fake_nvfp4_weight(w.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("fake", [qt.fake_nvfp4_weight, qt.fake_mxfp8_weight, qt.fake_nvfp4, qt.fake_mxfp8])
def test_fake_quantisation_is_one_graph_for_all_inputs(fake):
    """What torch.compile and CUDA graphs need: a branch on data would raise here, since fake tensors hold none."""
    graph = make_fx(lambda w: fake(w), tracing_mode="fake")(weights())
    for seed in range(2):
        w = weights(seed)
        w[0] = 0
        assert torch.equal(graph(w), fake(w))


@pytest.mark.parametrize("fake", [qt.fake_nvfp4, qt.fake_mxfp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_activations_do_not_depend_on_the_batch(fake, dtype):
    x = weights(3, (2, 7, K), 1.0).to(dtype)
    x[1, 3] *= 1000  # a loud token
    x[0, 0] = 0
    out = fake(x)
    assert out.dtype == dtype
    assert out.shape == x.shape
    for b in range(2):
        for t in range(7):
            assert torch.equal(out[b, t], fake(x[b, t]))
    relative = (out - x).square().mean().sqrt() / x.square().mean().sqrt()
    assert relative < (0.13 if fake is qt.fake_nvfp4 else 0.04)
    assert relative > 0.01
    assert out[0, 0].eq(0).all()


def test_fake_nvfp4_takes_six_only():
    x = torch.randn(11, K, generator=torch.Generator().manual_seed(1))
    values, scales = qt._nvfp4_round(
        x.view(11, -1, 16), x.abs().amax(-1)[:, None, None], torch.tensor(qt.DENOMINATOR), 6.0
    )
    expected = values * scales * (x.abs().amax(-1) / torch.tensor(qt.DENOMINATOR))[:, None, None]
    assert torch.equal(qt.fake_nvfp4(x), expected.flatten(-2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("denominator", [2688.0, 1536.0])
def test_gpu_writes_the_same_bytes(denominator):
    w = weights(9, (5, 61, 256))
    cpu, gpu = qt.nvfp4_quantize(w, denominator), qt.nvfp4_quantize(w.cuda(), denominator)
    assert all(torch.equal(bits(a), bits(b.cpu())) for a, b in zip(cpu, gpu, strict=True))
    assert torch.equal(qt.nvfp4_dequantize(*cpu), qt.nvfp4_dequantize(*gpu).cpu())
    cpu, gpu = qt.mxfp8_quantize(w), qt.mxfp8_quantize(w.cuda())
    assert all(torch.equal(bits(a), bits(b.cpu())) for a, b in zip(cpu, gpu, strict=True))
    assert torch.equal(qt.mxfp8_dequantize(*cpu), qt.mxfp8_dequantize(*gpu).cpu())
    assert torch.equal(qt.fake_nvfp4(w), qt.fake_nvfp4(w.cuda()).cpu())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(hasattr(qt.fake_nvfp4_weight, "__wrapped__"), reason="shape checks cannot be compiled")
@pytest.mark.parametrize("fake", [qt.fake_nvfp4_weight, qt.fake_mxfp8_weight, qt.fake_nvfp4, qt.fake_mxfp8])
def test_gpu_compiled_differs_on_near_ties_only(fake):
    w = weights(9, (5, 61, 256)).cuda()
    w[2] = 0
    out, expected = torch.compile(fake, fullgraph=True)(w), fake(w)
    # A block that takes the other target, or a value on the other side of a tie; the rest to the last bit.
    close = (out - expected).abs() <= 1e-6 * expected.abs()
    assert close.float().mean() > 0.999
    assert out.isfinite().all()
    error, wanted = (out - w).square().mean(), (expected - w).square().mean()
    assert error < 1.0001 * wanted


@pytest.mark.parametrize("fake", [qt.fake_nvfp4, qt.fake_mxfp8], ids=["nvfp4", "mxfp8"])
def test_fake_quantisation_makes_no_finite_number_of_an_infinity(fake):
    x = weights(shape=(2, 3, 64), scale=1.0)
    expected = fake(x)
    x[1, 2, 40] = -math.inf
    y = fake(x)
    assert not y[1, 2, 40].isfinite()
    assert y[:1].equal(expected[:1])
    assert y[1, :2].equal(expected[1, :2])


@pytest.mark.parametrize("quantisation", [qt.NVFP4, qt.MXFP8])
def test_weights_of_8_bits_are_refused(quantisation):
    with pytest.raises(InputError, match="up: float8_e4m3fn, expected a floating-point weight"):
        qt.quantize_stored(quantisation, torch.ones(E, N, 64).to(torch.float8_e4m3fn), "up")


def test_a_denominator_too_small_for_the_weights_is_refused():
    """a / denominator would overflow."""
    with pytest.raises(InputError, match="weight: expert 0 holds"):
        qt.nvfp4_quantize(torch.ones(1, 2, 32), 1e-39)
