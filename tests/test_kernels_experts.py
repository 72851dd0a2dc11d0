"""Contract of the packed experts: the repack, the assembly (emulated), the list of items, both products.

The kernel for Hopper unpacks words by inline assembly, which Triton's interpreter cannot run. So its text is executed
here instruction by instruction on integers, and the warps' products are formed as `mma.sync.m16n8k16` defines them; the
plain form of the kernel runs in the interpreter, and on a GPU both run.
"""

from pathlib import Path

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

import inkling_ref
from inkling_ref import InputError, load, moe
from inkling_ref.kernels import experts as kernel
from inkling_ref.kernels import experts_hopper as hopper
from inkling_ref.kernels import packing
from inkling_ref.moe import ExpertMatrix
from inkling_ref.quantization import GROUP, MXFP8, NVFP4, fake_mxfp8, fake_nvfp4, quantize_stored

formats = pytest.mark.parametrize("form", [NVFP4, MXFP8])
forms = pytest.mark.parametrize("form", ["dense", NVFP4, MXFP8])


def random_bytes(form, E, N, K):
    """A matrix of random bytes, all that a checkpoint may hold: every code under every scale, zeros included."""
    scales = torch.randint(0, 127 if form == NVFP4 else packing.LARGEST_E8M0 + 1, (E, N, K // GROUP[form]))
    scales = scales.to(torch.uint8)
    codes = torch.randint(0, 256, (E, N, K // 2 if form == NVFP4 else K), dtype=torch.uint8)
    if form == NVFP4:
        amax, denominator = torch.rand(E), torch.tensor(1536.0)
        return ExpertMatrix(codes, scales.view(torch.float8_e4m3fn), amax, denominator)
    codes[codes & 0x7F == 0x7F] = 0
    return ExpertMatrix(codes.view(torch.float8_e4m3fn), scales)


def same_bits(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


# ---------------------------------------------------------------- the assembly, instruction by instruction


def halves(register):
    return torch.stack([register & 0xFFFF, register >> 16], -1)


def bfloat16_of(register):
    """The two bfloat16 numbers of a register, as float32, a last axis of two."""
    return (halves(register) << 16).to(torch.int32).view(torch.float32)


def multiply_bfloat16(a, b):
    product = bfloat16_of(a) * bfloat16_of(b)
    rounded = product.to(torch.bfloat16)
    assert torch.equal(rounded.float(), product), "the product is not exact in bfloat16"
    bits = rounded.view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def permute_bytes(a, b, selector):
    pool = [(a >> 8 * i) & 0xFF for i in range(4)] + [(b >> 8 * i) & 0xFF for i in range(4)]
    return sum(pool[selector >> 4 * i & 0xF] << 8 * i for i in range(4))


def logic(a, b, c, table):
    """lop3: the truth table's bit 4 a + 2 b + c."""
    return sum((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)


PTX = {
    "and.b32": lambda a, b: a & b, "shl.b32": lambda a, n: a << n, "shr.u32": lambda a, n: a >> n, "lop3.b32": logic,
    "shf.r.wrap.b32": lambda low, high, n: low >> n | high << 32 - n, "prmt.b32": permute_bytes,
    "mad.lo.u32": lambda a, b, c: a * b + c, "mul.bf16x2": multiply_bfloat16,
}  # fmt: skip


def run(assembly, inputs):
    """Execute `assembly` on int64 tensors that stand for 32-bit registers; `inputs`: number -> register."""
    registers = {f"${i}": value for i, value in inputs.items()}

    def operand(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in assembly.value.strip("\n{}").replace("\n", " ").split(";"):
        op, _, operands = line.strip().partition(" ")
        if op and not op.startswith("."):
            target, *sources = operands.replace(" ", "").split(",")
            sources = [operand(s) if op != "lop3.b32" or i < 3 else int(s, 0) for i, s in enumerate(sources)]
            registers[target] = PTX[op](*sources) & 0xFFFFFFFF
    return registers


def unsigned(t):
    return t.to(torch.int64) & 0xFFFFFFFF


def fragments(form, matrix):
    """What the lanes hold: [E, tile, step, warp, chunk, lane, s, q, e], q = 2 h + r, as float32."""
    nvfp4, words = form == NVFP4, unsigned(matrix.weight)
    scale_asm = hopper.NVFP4_SCALES if nvfp4 else hopper.MXFP8_SCALES
    bytes_ = run(scale_asm, {4: unsigned(matrix.scale.flatten(-2).view(torch.int32))})
    scales = torch.stack([bytes_[f"${i}"] for i in range(4)], -1)  # [..., warp, lane, word, (chunk % 2, r)]
    scales = scales.unflatten(-1, (2, 2)).flatten(-3, -2).transpose(-3, -2)  # [..., warp, chunk, lane, r]
    scales = scales[..., None, :]
    if nvfp4:
        even, odd = words[..., 0::2], words[..., 1::2]
        low, high = scales[..., 0].expand_as(even), scales[..., 1].expand_as(even)
        out = run(hopper.NVFP4_WORDS, {8: even, 9: odd, 10: low, 11: low, 12: high, 13: high})
        registers = torch.stack([out[f"${i}"] for i in range(8)], -1).unflatten(-1, (2, 4)).flatten(-3, -2)
    else:
        words = words.movedim(-4, -3).flatten(-3, -2)  # [..., warp, chunk, lane, s, h]
        low, high = scales[..., 0].expand_as(words[..., 0]), scales[..., 1].expand_as(words[..., 0])
        out = run(hopper.MXFP8_WORDS, {4: words[..., 0], 5: words[..., 1], 6: low, 7: low, 8: high, 9: high})
        registers = torch.stack([out[f"${i}"] for i in range(4)], -1)
    return bfloat16_of(registers)


# ---------------------------------------------------------------- the repack


@formats
@pytest.mark.parametrize(("E", "N", "K"), [(1, 2, 32), (3, 70, 288), (2, 64, 256), (1, 130, 544)], ids=str)
def test_repack_is_reversible_bit_for_bit(form, E, N, K):
    matrix = random_bytes(form, E, N, K)
    packed = packing.pack(matrix)
    assert packing.is_packed(packed)
    assert not packing.is_packed(matrix)
    for t, (dtype, shape) in zip(packed, packing.packed_layout(form, (E, N, K)).values(), strict=False):
        assert (t.dtype, t.shape) == (dtype, shape)
    for one, other in zip(packing.unpack(packed, N, K), matrix, strict=True):
        assert one is other or same_bits(one, other)


def test_every_code_and_every_scale_survives():
    codes = torch.arange(256, dtype=torch.uint8).repeat(127)  # every pair of codes under every scale
    codes = codes.view(127, 2, 128).transpose(0, 1).reshape(1, 254, 128)
    scales = torch.arange(127, dtype=torch.uint8).repeat(2)[None, :, None].expand(1, 254, 16).contiguous()
    matrix = ExpertMatrix(codes, scales.view(torch.float8_e4m3fn), torch.ones(1), torch.ones(()))
    packed = packing.pack(matrix)
    restored = packing.unpack(packed, 254, 256)
    assert same_bits(restored.weight, codes)
    assert same_bits(restored.scale, matrix.scale)
    assert_decodes(NVFP4, matrix)


def test_words_are_linear_in_their_bits():
    codes = torch.randint(0, 16, (999, 4, 2), dtype=torch.uint8)
    other = torch.randint(0, 16, (999, 4, 2), dtype=torch.uint8)
    words = packing.encode_words(codes)
    assert torch.equal(packing.decode_words(words), codes)
    assert torch.equal(words ^ packing.encode_words(other), packing.encode_words(codes ^ other))
    assert packing.encode_words(torch.zeros(4, 2, dtype=torch.uint8)) == 0


def test_packing_refuses():
    with pytest.raises(InputError, match="bfloat16 matrix cannot be packed"):
        packing.pack(ExpertMatrix(torch.zeros(1, 4, 32, dtype=torch.bfloat16)))
    for byte in (0x7F, 0x80):  # NaN and -0
        matrix = random_bytes(NVFP4, 2, 4, 32)
        matrix.scale.view(torch.uint8)[1, 2, 1] = byte
        with pytest.raises(InputError, match="NaN or negative NVFP4 scale"):
            packing.pack(matrix)
    matrix = random_bytes(MXFP8, 1, 4, 32)
    matrix.scale[0, 3, 0] = packing.LARGEST_E8M0 + 1
    with pytest.raises(InputError, match=r"above 2\^15"):
        packing.pack(matrix)


def test_a_loaded_layer_is_repacked_in_place():
    model = load(Path(inkling_ref.__file__).parent / "data" / "nano", experts="packed")
    experts = model.llm.layers[1].mlp.experts
    before = {name: experts.matrix(name) for name in ("w13_weight", "w2_weight")}
    packing.pack_layer(experts)
    for name, matrix in before.items():
        rows, columns = matrix.dense(0, torch.float32).shape
        assert packing.is_packed(experts.matrix(name))
        for one, other in zip(packing.unpack(experts.matrix(name), rows, columns), matrix, strict=True):
            assert one is other or same_bits(one, other)


def assert_decodes(form, matrix):
    """The assembly's numbers, multiplied as the tensor cores do, are x W^T of the dequantised matrix."""
    one = ExpertMatrix(
        matrix.weight, matrix.scale, *((torch.ones(len(matrix.weight)), torch.ones(())) if form == NVFP4 else ())
    )
    packed = packing.pack(one)
    E, N, K = *matrix.scale.shape[:2], matrix.scale.shape[2] * GROUP[form]
    tiles, steps = packed.weight.shape[1:3]
    # [E, tile, step, warp, chunk, g, t, s, h, r, e]: fragment row g + 8 r, column 16 s + 8 h + 2 t + e of its k-step.
    held = fragments(form, packed).unflatten(5, (8, 4)).unflatten(-2, (2, 2)) * 256
    rows = held.permute(0, 1, 3, 5, 9, 2, 4, 6, 7, 8, 10)  # tile, warp, g, r: natural rows; step, chunk, t, s, h, e
    decoded = rows.reshape(E, tiles * 64, steps * 256)
    exact = torch.stack([one.dense(e, torch.float32) for e in range(E)])
    assert torch.equal(decoded[:, :N, :K], exact)
    assert not decoded[:, N:].any()
    assert not decoded[:, :, K:].any()


@formats
def test_the_assembly_decodes_what_the_reference_decodes(form):
    matrix = random_bytes(form, 2, 70, 288)
    if form == MXFP8:  # below 2^-107 the products leave the range of bfloat16
        matrix.scale.clamp_(min=20)
    assert_decodes(form, matrix)


# ---------------------------------------------------------------- items


def plan_of(ids, E, slots, origin=0):
    """The list as {expert: pairs}, after a check of its shape: whole items, padding that repeats the first pair."""
    experts, table = kernel.plan(ids.to(DEVICE), E, slots, origin)
    flat, found, last = ids.flatten().tolist(), {}, -1
    for expert, row in zip(experts.tolist(), table.tolist(), strict=True):
        if expert == -1:
            last = E
            continue
        assert last <= expert < E  # in order, and the unused at the end
        last = expert
        pairs = [p for p in row if p >= 0]
        assert pairs
        assert row == pairs + [~found.get(expert, pairs)[0]] * (slots - len(pairs))
        assert all(flat[p] - origin == expert for p in pairs)
        found.setdefault(expert, []).extend(pairs)
    return found


@needs_device
@pytest.mark.parametrize("slots", [8, 16])
@pytest.mark.parametrize(
    ("N", "k", "E", "used"), [(1, 3, 7, 7), (5, 4, 9, 9), (11, 4, 9, 4), (17, 8, 30, 8), (40, 1, 5, 1)], ids=str
)
def test_items_hold_every_pair_once(N, k, E, used, slots):
    ids = torch.rand(N, used).topk(k, -1).indices + E - used
    found = plan_of(ids, E, slots)
    assert sorted(p for pairs in found.values() for p in pairs) == list(range(N * k))
    assert all(pairs == sorted(pairs) for pairs in found.values())


@needs_device
@pytest.mark.parametrize("few_pairs", [2048, 0], ids=["one launch", "two launches"])
@pytest.mark.parametrize(
    ("N", "k", "E", "used"), [(1, 3, 7, 7), (86, 3, 5, 4), (257, 3, 30, 30), (767, 2, 6, 3), (999, 1, 17, 1)], ids=str
)
def test_items_of_many_pairs_and_of_one_rank(N, k, E, used, few_pairs, monkeypatch):
    """Several blocks a program; the ids are those of E experts from the third on, and of others around them."""
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    monkeypatch.setattr(kernel, "PROGRAMS", 2)
    ids = torch.rand(N, used + 4).topk(k, -1).indices
    ids[0, 0] = -1
    found = plan_of(ids, E, 16, 2)
    here = ((ids >= 2) & (ids < E + 2)).flatten().nonzero()[:, 0].tolist()
    assert sorted(p for pairs in found.values() for p in pairs) == here
    assert all(pairs == sorted(pairs) for pairs in found.values())


@needs_device
@formats
@pytest.mark.parametrize(("N", "K", "columns"), [(3, 256, 256), (5, 96, 256), (7, 1088, 1280)], ids=str)
def test_the_words_column_order(form, N, K, columns):
    x, (s, h) = placed(torch.randn(N, K), torch.float16), (4, 2) if form == NVFP4 else (8, 2)
    filled = torch.nn.functional.pad(x, (0, columns - K))
    ordered = kernel.in_core_order(x, form == NVFP4, columns)
    assert torch.equal(ordered, filled.view(N, -1, 4, s, h, 2).permute(0, 1, 3, 4, 2, 5).reshape(N, columns))
    assert torch.equal(kernel.in_natural_order(ordered, form == NVFP4), filled)


# ---------------------------------------------------------------- both products


def problem(form, N, E, D, I, k, dtype, used=None):
    """Arguments of `experts`; the experts as released."""
    matrices = []
    for rows, columns in ((2 * I, D), (D, I)):
        w = 2 * torch.randn(E, rows, columns) / columns**0.5
        stored = {"": w.to(dtype)} if form == "dense" else quantize_stored(form, w)
        matrices.append(ExpertMatrix(*(t.to(DEVICE) for t in stored.values())))
    h, weights = placed(torch.randn(N, D), dtype), placed(torch.rand(N, k), torch.float32)
    ids = torch.rand(N, used or E).topk(k, -1).indices.to(DEVICE)
    return [h, weights, ids, *matrices, 4.0, 25.0]


def strided(t):
    """The same values, every second one of a larger tensor's experts."""
    return torch.stack([t, t.clone()], 1).flatten(0, 1)[::2]


def view_of(matrix):
    """The same matrix, none of whose tensors is contiguous."""
    return ExpertMatrix(*(strided(t) if t is not None and t.ndim else t for t in matrix))


def in_float64(h, weights, ids, w13, w2, *rest):
    dense = [
        ExpertMatrix(torch.stack([m.dense(e, torch.float32) for e in range(len(m.weight))]).double()) for m in (w13, w2)
    ]
    return moe.experts(h.double(), weights.double(), ids, *dense, *rest)


def assert_contract(arguments):
    h = arguments[0]
    exact, eager = in_float64(*arguments), moe.experts(*arguments)
    actual = kernel.experts(*arguments)
    assert actual.dtype == h.dtype
    assert actual.shape == h.shape
    assert relative_rms(actual, exact) <= bound(h.dtype, eager, exact)


SIZES = {  # N, E, D, I, k, experts used
    "one token": (1, 5, 96, 64, 3, 5), "few": (7, 6, 160, 32, 2, 6), "wide": (3, 3, 64, 224, 2, 3),
    "all to one": (37, 4, 32, 96, 1, 1), "two items each": (23, 5, 32, 32, 4, 4),
    "larger items": (257, 3, 32, 32, 1, 2),
}  # fmt: skip


@needs_device
@dtypes
@forms
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_experts(form, sizes, dtype):
    N, E, D, I, k, used = sizes
    assert_contract(problem(form, N, E, D, I, k, dtype, used))


@needs_device
@formats
def test_experts_quantise_activations(form):
    quantize = {NVFP4: fake_nvfp4, MXFP8: fake_mxfp8}[form]
    arguments = problem(form, 5, 4, 64, 96, 2, torch.float32)
    h, weights, ids, *rest = arguments
    actual = kernel.experts(h, weights, ids, *rest, quantize)
    assert relative_rms(actual, moe.experts(*arguments, quantize)) < 2e-3  # a code may flip where sums differ
    assert relative_rms(actual, moe.experts(*arguments)) > 5e-3


def with_others(arguments):
    """Arguments for a rank whose experts are those from 3 on: the others' ids are around them; and the exact result."""
    h, weights, ids, w13, *rest = arguments
    others = (torch.arange(ids.numel(), device=ids.device) % 3 != 1).view_as(ids)
    others[1:][-1:] = True  # of several tokens the last has no expert here
    exact = in_float64(h, weights.masked_fill(others, 0), ids, w13, *rest)
    their = torch.tensor([0, 2, 3 + len(w13.weight), -1], device=ids.device)
    ids = torch.where(others, their[torch.arange(ids.numel(), device=ids.device) % 4].view_as(ids), ids + 3)
    return [h, weights, ids, w13, *rest], exact


@needs_device
@forms
@pytest.mark.parametrize(("N", "k"), [(1, 3), (7, 2), (2, 4)], ids=str)
def test_experts_of_other_ranks_add_nothing(form, N, k):
    arguments, exact = with_others(problem(form, N, 5, 64, 32, k, torch.float32))
    actual = kernel.experts.of_rank(3)(*arguments)
    assert relative_rms(actual, exact) < 2e-6
    assert (actual[1:][-1:] == 0).all()


@needs_device
def test_a_token_with_nan_spoils_only_itself():
    arguments = problem(NVFP4, 6, 4, 64, 32, 2, torch.float32)
    clean = kernel.experts(*arguments)
    arguments[0][4, 7] = torch.nan
    dirty = kernel.experts(*arguments)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 2, 3, 5]], clean[[0, 1, 2, 3, 5]])


@needs_device
def test_a_very_large_call_is_several(monkeypatch):
    arguments, sizes, combine = problem(NVFP4, 23, 4, 64, 32, 2, torch.float32), [], kernel.combine
    whole = kernel.experts(*arguments)
    monkeypatch.setattr(kernel, "combine", lambda part, *rest: sizes.append(part.numel()) or combine(part, *rest))
    monkeypatch.setattr(kernel, "OFFSETS", 9 * 2 * (64 + 255) + 1)
    assert relative_rms(kernel.experts(*arguments), whole) < 1e-6
    assert sizes == [9 * 2 * 64, 9 * 2 * 64, 5 * 2 * 64]


@needs_device
@formats
def test_experts_read_views(form):
    arguments = problem(form, 5, 4, 64, 96, 2, torch.float32)
    views = [view_of(m) for m in arguments[3:5]]
    assert not any(t.is_contiguous() for m in views for t in m if t is not None and t.ndim)
    assert torch.equal(kernel.experts(*arguments[:3], *views, *arguments[5:]), kernel.experts(*arguments))


@needs_device
def test_experts_refuse_what_they_cannot_read():
    h, weights, ids, w13, w2, *caps = problem(NVFP4, 2, 3, 64, 32, 2, torch.float32)
    with pytest.raises(InputError, match="one matrix is repacked"):
        kernel.experts(h, weights, ids, packing.pack(w13), w2, *caps)
    with pytest.raises(InputError, match="expected bfloat16 on Hopper"):
        kernel.experts(h, weights, ids, packing.pack(w13), packing.pack(w2), *caps)


@needs_device
@pytest.mark.parametrize(
    ("E", "k", "ways"),
    [
        (48, 8, {1: "token", 2: "pairs", 8: "pairs", 9: "few", 256: "few", 257: "many"}),  # Small on 8 ranks
        (96, 8, {1: "token", 4: "pairs", 5: "few"}),
        (192, 8, {1: "token", 2: "pairs", 3: "few"}),
        (8, 4, {1: "token", 16: "pairs", 17: "few"}),  # nano on 2
        (49, 1, {1: "token", 62: "pairs", 63: "few"}),
    ],
    ids=str,
)
def test_which_way_repacked_experts_go(E, k, ways, monkeypatch):
    """On a rank; where all experts are, one token goes the way of a few."""
    found = []
    for way in ("token", "pairs", "few", "many"):
        monkeypatch.setattr(kernel, f"_packed_{way}", lambda call, way=way: found.append((way, call.origin)) or call.x)
    monkeypatch.setattr(kernel, "capability_major", lambda device: 9)
    monkeypatch.setattr(kernel, "FLOATS", (torch.bfloat16, torch.float32))  # the interpreter's are without it
    matrices = [
        ExpertMatrix(*(t.to(DEVICE) for t in packing.pack(random_bytes(MXFP8, E, *shape)) if t is not None))
        for shape in ((64, 32), (32, 32))
    ]

    def run(op, N):
        h = torch.zeros(N, 32, dtype=torch.bfloat16, device=DEVICE)
        weights, ids = torch.zeros(N, k, device=DEVICE), torch.zeros(N, k, dtype=torch.int64, device=DEVICE)
        assert op(h, weights, ids, *matrices, 4.0, 25.0).shape == h.shape
        return found.pop()

    for N, way in ways.items():
        assert run(kernel.experts.of_rank(3), N) == (way, 3)
        assert run(kernel.experts, N) == ("many" if way == "many" else "few", 0)


@formats
def test_repacked_matrices_have_no_gaps(form):
    """The kernels read them as one block."""
    _, _, _, w13, w2, *_ = problem(form, 2, 4, 64, 32, 2, torch.float32)
    w13, w2 = (packing.pack(view_of(m)) for m in (w13, w2))
    assert kernel._check_matrices(w13, w2, 64, True) == 32
    for name in ("weight", "scale", "amax") if form == NVFP4 else ("weight", "scale"):
        views = w13._replace(**{name: strided(getattr(w13, name))})
        with pytest.raises(InputError, match=rf"w13\.{name} of stride .*, expected no gaps"):
            kernel._check_matrices(views, w2, 64, True)


@needs_device
def test_no_token_is_no_work():
    h, weights, ids, *rest = problem(NVFP4, 2, 3, 64, 32, 2, torch.float32)
    for op in (kernel.experts, kernel.of_rank(5)):
        assert op(h[:0], weights[:0], ids[:0], *rest).shape == (0, 64)


# ---------------------------------------------------------------- the same on Hopper, repacked

hopper_only = pytest.mark.skipif(
    DEVICE == "cpu" or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper"
)
PACKED = {  # N, E, D, I, k, experts used
    "one token": (1, 5, 96, 64, 3, 5), "one, eight experts": (1, 11, 96, 256, 8, 11),
    "three tokens": (3, 6, 320, 96, 2, 6), "items": (19, 7, 256, 256, 4, 7), "two items each": (23, 5, 288, 32, 4, 4),
    "many": (300, 5, 96, 352, 2, 5), "many to one": (270, 3, 64, 64, 1, 1),
}  # fmt: skip


def packed_problem(form, sizes):
    """Arguments for repacked matrices, and the same as released."""
    N, E, D, I, k, used = sizes
    released = problem(form, N, E, D, I, k, torch.bfloat16, used)
    return [*released[:3], *map(packing.pack, released[3:5]), *released[5:]], released


@hopper_only
@formats
@pytest.mark.parametrize("sizes", PACKED.values(), ids=PACKED)
def test_packed_is_no_farther_from_float64_than_dequantised_bfloat16(form, sizes):
    packed, released = packed_problem(form, sizes)
    exact = in_float64(*released)
    actual = kernel.experts(*packed)
    assert relative_rms(actual, exact) <= relative_rms(moe.experts(*released), exact)
    assert torch.equal(actual, kernel.experts(*packed))  # the order of every sum is fixed


@hopper_only
@formats
@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
def test_packed_quantises_activations(form, tokens):
    packed, released = packed_problem(form, (tokens, 5, 64, 96, 2, 5))
    quantize = {NVFP4: fake_nvfp4, MXFP8: fake_mxfp8}[form]
    exact, plain = in_float64(*released, quantize), in_float64(*released)
    # Where sums differ in the last bit a code may flip, in the reference as here: far less than quantising does.
    for op in (kernel.experts, kernel.experts.of_rank(0)):
        assert relative_rms(op(*packed, quantize), exact) < 0.7 * relative_rms(plain, exact)


@hopper_only
@pytest.mark.parametrize("tokens", [1, 9, 40, 300])
def test_packed_experts_of_other_ranks_add_nothing(tokens):
    packed, released = packed_problem(NVFP4, (tokens, 5, 64, 96, 3, 5))
    arguments, exact = with_others(released)
    actual = kernel.experts.of_rank(3)(*packed[:2], arguments[2], *packed[3:])
    assert relative_rms(actual, exact) <= bound(torch.bfloat16, moe.experts(*released), in_float64(*released))
    assert (actual[1:][-1:] == 0).all()


def window(matrices, origin, stop):
    """The experts from origin to stop."""
    return [ExpertMatrix(*(t if t is None or t.ndim == 0 else t[origin:stop] for t in m)) for m in matrices]


@hopper_only
@formats
@pytest.mark.parametrize("N", [1, 2, 5, 8])
@pytest.mark.parametrize(
    ("E", "D", "I", "k"), [(5, 96, 64, 3), (11, 800, 544, 8), (7, 1344, 32, 5), (6, 32, 2592, 1)], ids=str
)
def test_a_few_tokens_on_a_rank(form, E, D, I, k, N):
    """All their pairs (more than programs of their own), some, few, none: a token of none gets zeros."""
    (h, weights, ids, w13, w2, *caps), released = packed_problem(form, (N, E, D, I, k, E))
    for origin, stop in ((0, E), (1, E - 1), (E // 2, E // 2 + 1), (E - 2, E)):
        rank, ours = kernel.experts.of_rank(origin), window((w13, w2), origin, stop)
        actual = rank(h, weights, ids, *ours, *caps)
        assert torch.equal(actual, rank(h, weights, ids, *ours, *caps))
        here = (ids >= origin) & (ids < stop)
        if here.any():
            masked = [h, weights.masked_fill(~here, 0), *released[2:]]
            exact = in_float64(*masked)
            assert relative_rms(actual, exact) <= bound(torch.bfloat16, moe.experts(*masked), exact)
            spoiled, any_here = rank(torch.full_like(h, torch.nan), weights, ids, *ours, *caps), here.any(dim=1)
            assert spoiled[any_here].isnan().all()
            assert not spoiled[~any_here].any()
        nothing = rank(h, weights, ids + E, *ours, *caps)
        assert torch.equal(nothing, torch.zeros_like(h))


@hopper_only
@formats
@pytest.mark.parametrize("N", [1, 4])
def test_tokens_on_a_rank_are_the_same_bits_whatever_else_is_there(form, N):
    (h, weights, ids, w13, w2, *caps), _ = packed_problem(form, (N, 11, 800, 544, 4, 11))
    ids = torch.tensor([[5, 0, 3, 10], [0, 5, 10, 2], [9, 8, 7, 6], [4, 3, 0, 1]][:N], device=DEVICE)
    found = [
        kernel.experts.of_rank(origin)(h, weights, ids, *window((w13, w2), origin, stop), *caps)
        for origin, stop in ((3, 6), (1, 9), (3, 10))
    ]
    of_three = [0, 1] if N > 1 else [0]  # whose experts here are 3 to 5 on all three ranks
    assert found[0][of_three].any()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][of_three], found[2][of_three])


@hopper_only
@pytest.mark.parametrize("N", [1, 6])
def test_tokens_on_a_rank_in_a_graph_follow_new_routes(N):
    (h, weights, ids, w13, w2, *caps), _ = packed_problem(NVFP4, (N, 9, 96, 64, 3, 9))
    rank, ours = kernel.experts.of_rank(2), window((w13, w2), 2, 7)
    rank(h, weights, ids, *ours, *caps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rank(h, weights, ids, *ours, *caps)
    for chosen in ([4, 2, 6], [0, 8, 1], [7, 3, 0]):  # three of this rank, none, one
        ids.copy_(torch.tensor([chosen]))
        graph.replay()
        assert torch.equal(out, rank(h, weights, ids, *ours, *caps))


@hopper_only
@pytest.mark.parametrize("tokens", [1, 13, 300])
def test_packed_in_a_graph_follows_new_routes(tokens):
    packed, _ = packed_problem(NVFP4, (tokens, 9, 64, 96, 2, 4))
    kernel.experts(*packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.experts(*packed)
    packed[2].copy_(torch.rand(tokens, 9).topk(2, -1).indices)
    graph.replay()
    assert torch.equal(out, kernel.experts(*packed))


@hopper_only
@pytest.mark.parametrize("tokens", [3, 11, 300])
def test_packed_token_with_nan_spoils_only_itself(tokens):
    packed, _ = packed_problem(MXFP8, (tokens, 4, 64, 32, 2, 4))
    clean = kernel.experts(*packed)
    packed[0][2, 7] = torch.nan
    dirty = kernel.experts(*packed)
    others = torch.arange(tokens, device=DEVICE) != 2
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[others], clean[others])
