r"""Expert weights in the order in which the tensor cores take them: a one-time repack, reversible bit for bit.

`experts_hopper` multiplies packed weights without shared memory: a lane loads 16 bytes that hold exactly the weights
which it hands to its own `mma.sync.m16n8k16`, and unpacks them in registers. So bytes are stored in fragment order. A
tile is 64 rows (4 warps of 16) by a step of 256 columns; short edges are filled with zero codes and zero scales.

**Rows.** Lane 4g + t of a warp holds rows g and 8 + g of the fragment (r = 0, 1). They are rows 2g + r of the warp's
16, so that gate and up of one pair, neighbours in the release, meet in one lane.

**Columns.** Columns come in chunks of four blocks. For k-step s of a chunk the lane holds the fragment's columns
2t + e and 8 + 2t + e (h = 0, 1). They are columns 4s + 2h + e of the chunk's block t: a lane decodes the scales of one
block alone, and the activations that it needs are one run of that block, in the order in which they lie in memory.

| | block | columns a chunk | k-steps a chunk | chunks a step |
|---|---|---|---|---|
| NVFP4 | 16 | 64 | 4 | 4 |
| MXFP8 | 32 | 128 | 8 | 2 |

**Words.** A 32-bit word holds weights of one lane and k-step: all eight of NVFP4, the four of MXFP8 that share h.

    NVFP4  words [E, tiles, steps, warp 4, chunk 4, lane 32, s 4]
    MXFP8  words [E, tiles, steps, warp 4, chunk 2, s / 2 4, lane 32, s % 2 2, h 2]
    both   scales [E, tiles, steps, warp 4, lane 32, chunk, r 2]

**NVFP4's word code.** Four registers of two bfloat16 (e), q = 2h + r, must get sign, exponent and mantissa of a code
at bits 15 and 8..6 of their halves: where a bfloat16 has its sign, the low exponent bits and the top of its mantissa.
With M = 0x81C081C0,

$$ r_0 = u \wedge M, \quad r_1 = (u \ll 6) \wedge M, \quad r_2 = \mathrm{rotr}(u, 4) \wedge M, \quad
   r_3 = ((u \ll 2) \oplus (u \gg 6)) \wedge M $$

is eight operations for eight weights. Fields that do not overlap cannot do it (the four bit positions do not tile 16
bits by shifts); but the map is linear over GF(2) and invertible, so a word is the XOR of one constant for each bit set.
A register made so is code * 2^-126, subnormals included. Scales (E4M3, never negative) become c = 8 (q + 9) + m for
2^q (1 + m/8), subnormals normalised, so that c * 16 + 0x7600 is the bfloat16 scale * 2^118, and 160, which gives -0,
for zero. The product, weight * scale * 2^-8, has six significant bits: exact.

**MXFP8's word** is the bytes (r, e) = (0, 0), (1, 0), (0, 1), (1, 1); shifted and masked they are value * 2^-120. A
scale byte b stays as it is: b * 128 + 0x3800 is the bfloat16 2^(b - 127) * 2^112. (Scales below 2^-107 or so flush
products that bfloat16 cannot hold.)

Source: the layout and the word code are this project's own.
"""

import functools

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from ..errors import InputError
from ..moe import ExpertMatrix, Experts
from ..quantization import COMPANIONS, NVFP4

ROWS, STEP = 64, 256  # a tile
ZERO_SCALE = 160  # NVFP4's recoded zero
LARGEST_E4M3, LARGEST_E8M0 = 126, 142  # 448; 2^15: larger scales leave the range of bfloat16
MASK = 0x81C081C0  # where a pair of codes lands
# [q][e][bit of the code, mantissa to sign]: the word that sets this bit alone.
WORD_BITS = (
    ((0x4040, 0x80, 0x100, 0x8000), (0x40400000, 0x800000, 0x1000000, 0x80000000)),
    ((0x1, 0x2, 0x4, 0x200), (0x10000, 0x20000, 0x40000, 0x2000000)),
    ((0x400, 0x800, 0x1010, 0x80000), (0x4000000, 0x8000000, 0x10100000, 0x8)),
    ((0x10, 0x20, 0x4000, 0x2020), (0x100000, 0x202020, 0x40000000, 0x20202020)),
)


def tiles_of(rows: int) -> int:
    """Tiles that hold so many rows."""
    return -(-rows // ROWS)


def steps_of(columns: int) -> int:
    """Steps that hold so many columns."""
    return -(-columns // STEP)


def _unsigned(word: Tensor) -> Tensor:
    return word.to(torch.int64) & 0xFFFFFFFF


def _signed(word: Tensor) -> Tensor:
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


@functools.cache
def _word_table(device: torch.device) -> Int[Tensor, "q 2 16"]:
    """The word of one code alone, [q, e, code]."""
    bits = torch.tensor(WORD_BITS, dtype=torch.int64, device=device)
    table = torch.zeros(4, 2, 16, dtype=torch.int64, device=device)
    for bit in range(4):
        table ^= torch.where(torch.arange(16, device=device) >> bit & 1 == 1, bits[:, :, bit, None], 0)
    return table


def encode_words(codes: UInt8[Tensor, "*shape 4 2"]) -> Int[Tensor, "*shape"]:
    """E2M1 codes [..., q, e] to words."""
    table, word = _word_table(codes.device), 0
    for q in range(4):
        for e in range(2):
            word = word ^ table[q, e][codes[..., q, e].long()]
    return _signed(word)


def word_registers(words: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape 4"]:
    """The four registers of the module docstring for each NVFP4 word, as int64."""
    u = _unsigned(words)
    rotated = u >> 4 | (u << 28 & 0xFFFFFFFF)
    return torch.stack([u & MASK, u << 6 & MASK, rotated & MASK, (u << 2 ^ u >> 6) & MASK], -1)


def decode_words(words: Int[Tensor, "*shape"]) -> UInt8[Tensor, "*shape 4 2"]:
    """The inverse of `encode_words`."""
    halves = torch.stack([(registers := word_registers(words)) & 0xFFFF, registers >> 16], -1)
    return (halves >> 15 << 3 | halves >> 6 & 7).to(torch.uint8)


def _recode_scales(scales: UInt8[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """E4M3 bytes, not negative, to c of the module docstring."""
    table = [ZERO_SCALE, *(0, 8, 12, 16, 18, 20, 22), *range(24, 143)]
    return torch.tensor(table, dtype=torch.uint8, device=scales.device)[scales.int()]


def _original_scales(packed: UInt8[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    table = torch.zeros(256, dtype=torch.uint8, device=packed.device)
    original = torch.arange(127, dtype=torch.uint8, device=packed.device)
    table[_recode_scales(original).long()] = original
    return table[packed.int()]


# Natural axes of a padded matrix, and where each goes. Rows (tile, w, g, r), columns of codes (step, kc, t, s, h, e).
_NVFP4_ORDER = (0, 4, 1, 5, 2, 6, 7, 8, 3, 9)  # tile, step, w, kc, g, t, s | h, r, e: one word
_MXFP8_ORDER = (0, 4, 1, 5, 7, 2, 6, 8, 9, 10, 3)  # tile, step, w, kc, s/2, g, t, s%2, h | e, r: one word
_SCALE_ORDER = (0, 4, 1, 2, 6, 5, 3)  # tile, step, w, g, t, kc, r of (tile, w, g, r, step, kc, t)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def _pack_codes(codes: UInt8[Tensor, "N K"], nvfp4: bool) -> Tensor:
    """One expert's codes, a byte each, as words."""
    tiles, steps = tiles_of(codes.shape[0]), steps_of(codes.shape[1])
    codes = _padded(codes, tiles * ROWS, steps * STEP)
    if nvfp4:
        axes = codes.view(tiles, 4, 8, 2, steps, 4, 4, 4, 2, 2).permute(_NVFP4_ORDER)
        return encode_words(axes.reshape(tiles, steps, 4, 4, 32, 4, 4, 2))
    axes = codes.view(tiles, 4, 8, 2, steps, 2, 4, 4, 2, 2, 2).permute(_MXFP8_ORDER)
    return axes.reshape(tiles, steps, 4, 2, 4, 32, 2, 2, 4).view(torch.int32).squeeze(-1)


def _unpack_codes(words: Tensor, nvfp4: bool) -> UInt8[Tensor, "N K"]:
    tiles, steps = words.shape[:2]
    if nvfp4:
        axes = decode_words(words).view(tiles, steps, 4, 4, 8, 4, 4, 2, 2, 2).permute(_inverse(_NVFP4_ORDER))
    else:
        axes = words.contiguous().view(torch.uint8).view(tiles, steps, 4, 2, 4, 8, 4, 2, 2, 2, 2)
        axes = axes.permute(_inverse(_MXFP8_ORDER))
    return axes.reshape(tiles * ROWS, steps * STEP)


def _pack_scales(scales: UInt8[Tensor, "N blocks"], nvfp4: bool) -> UInt8[Tensor, "tiles steps 4 32 chunks 2"]:
    tiles, blocks = tiles_of(scales.shape[0]), 16 if nvfp4 else 8  # blocks a step
    steps = -(-scales.shape[1] // blocks)
    scales = _padded(scales, tiles * ROWS, steps * blocks)
    axes = (_recode_scales(scales) if nvfp4 else scales).view(tiles, 4, 8, 2, steps, blocks // 4, 4)
    return axes.permute(_SCALE_ORDER).reshape(tiles, steps, 4, 32, blocks // 4, 2)


def _unpack_scales(packed: UInt8[Tensor, "tiles steps 4 32 chunks 2"], nvfp4: bool) -> UInt8[Tensor, "N blocks"]:
    tiles, steps, chunks = *packed.shape[:2], packed.shape[4]
    axes = packed.view(tiles, steps, 4, 8, 4, chunks, 2).permute(_inverse(_SCALE_ORDER))
    axes = axes.reshape(tiles * ROWS, steps * chunks * 4)
    return _original_scales(axes) if nvfp4 else axes


def packed_layout(quantisation: str, shape: tuple[int, int, int]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """`quantization.stored_layout` of a weight [E, N, K] in the kernels' order."""
    (E, N, K), nvfp4 = shape, quantisation == NVFP4
    tiles = (E, tiles_of(N), steps_of(K))
    layout = {
        "": (torch.int32, (*tiles, 4, 4, 32, 4) if nvfp4 else (*tiles, 4, 2, 4, 32, 2, 2)),
        "_scale": (torch.uint8, (*tiles, 4, 32, 4 if nvfp4 else 2, 2)),
    }
    outer = {"_amax": (torch.float32, (E,)), "_outer_scale_denominator": (torch.float32, ())}
    return layout | outer if nvfp4 else layout


def is_packed(matrix: ExpertMatrix) -> bool:
    """Whether a matrix is in the kernels' order; its dtype tells."""
    return matrix.weight.dtype == torch.int32


def pack(matrix: ExpertMatrix) -> ExpertMatrix:
    """A quantised matrix [E, N, K] in the kernels' order. Temporary memory is one expert's, a few bytes a weight.

    Raises:
        InputError: a matrix that is not quantised, a NaN or negative NVFP4 scale, or an MXFP8 scale above 2^15.
    """
    nvfp4 = matrix.amax is not None
    if matrix.scale is None:
        raise InputError(f"experts: a {matrix.weight.dtype} matrix cannot be packed, expected NVFP4 or MXFP8")
    scales = matrix.scale.view(torch.uint8)
    largest, what = LARGEST_E8M0, "an MXFP8 scale above 2^15, expected at most that"
    if nvfp4:
        largest, what = LARGEST_E4M3, "a NaN or negative NVFP4 scale, expected 0 to 448"
    if int(scales.max()) > largest:
        raise InputError(f"experts: {what}")
    E, N = scales.shape[:2]
    K = scales.shape[2] * (16 if nvfp4 else 32)
    words = scale_bytes = None
    for expert in range(E):
        codes = matrix.weight[expert].view(torch.uint8)
        codes = torch.stack((codes & 0xF, codes >> 4), -1).view(N, K) if nvfp4 else codes
        one = _pack_codes(codes, nvfp4), _pack_scales(scales[expert], nvfp4)
        if words is None:
            words, scale_bytes = (torch.empty(E, *t.shape, dtype=t.dtype, device=t.device) for t in one)
        words[expert], scale_bytes[expert] = one
    amax = matrix.amax.contiguous() if nvfp4 else None  # as the rest: a call that had to copy it would be a launch late
    return ExpertMatrix(words, scale_bytes, amax, matrix.denominator)


def unpack(matrix: ExpertMatrix, N: int, K: int) -> ExpertMatrix:
    """The inverse of `pack`: the released tensors of a matrix [E, N, K], bit for bit."""
    nvfp4 = matrix.amax is not None
    E, group = len(matrix.weight), 16 if nvfp4 else 32
    dtype = torch.uint8 if nvfp4 else torch.float8_e4m3fn
    weight = torch.empty(E, N, K // 2 if nvfp4 else K, dtype=torch.uint8, device=matrix.weight.device)
    scales = torch.empty(E, N, K // group, dtype=torch.uint8, device=matrix.weight.device)
    for expert in range(E):
        codes = _unpack_codes(matrix.weight[expert], nvfp4)[:N, :K]
        weight[expert] = codes[:, 0::2] | codes[:, 1::2] << 4 if nvfp4 else codes
        scales[expert] = _unpack_scales(matrix.scale[expert], nvfp4)[:N, : K // group]
    scales = scales.view(torch.float8_e4m3fn) if nvfp4 else scales
    return ExpertMatrix(weight.view(dtype), scales, matrix.amax, matrix.denominator)


def pack_layer(experts: Experts) -> None:
    """Repack the quantised experts of one layer in place, one matrix at a time.

    Raises:
        InputError: see `pack`.
    """
    for name in ("w13_weight", "w2_weight"):
        for suffix, tensor in zip(("", *COMPANIONS), pack(experts.matrix(name)), strict=True):
            setattr(experts, name + suffix, tensor)
