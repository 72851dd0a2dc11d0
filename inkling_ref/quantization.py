r"""Quantised expert weights, NVFP4 and MXFP8: encode, decode, and the fake quantisation that training uses.

Both formats cut the last axis (K, the one a matrix product sums over) into blocks that share a scale.

**NVFP4**, 4.5 bits a weight. A code is a 4-bit float (E2M1: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives), sixteen
codes share an 8-bit float (E4M3, never negative), and an expert shares two float32 numbers, `amax` and
`outer_scale_denominator`:

$$\hat w_{enk} = \mathrm{E2M1}(\mathrm{code}_{enk}) \; \mathrm{scale}_{en\lfloor k/16 \rfloor} \;
   (\mathrm{amax}_e / \mathrm{denominator})$$

Four over six, the quantiser: a block whose largest magnitude m becomes the code 6 leaves a hole, since nothing lies
between 4 and 6. With m at 4 the codes near the top lie closer together, at the price of a coarser grid at the bottom.
So each block is tried with both targets, 6 and 4,

$$\mathrm{scale} = \mathrm{E4M3}\big(\min(448, \;
   (m / \mathrm{target}) \; \mathrm{denominator} / \mathrm{amax}_e)\big)$$

$$\mathrm{code} = \mathrm{nearest}\big(w / (\mathrm{scale} \; (\mathrm{amax}_e / \mathrm{denominator}))\big)$$

and the one with the smaller squared error stays; a tie keeps 6. The denominator 2688 = 448 * 6 gives the expert's
largest weight the largest scale; 1536 = 256 * 6 leaves room for its target 4 (scale 384). A stored one always rules.

**MXFP8**, 8.25 bits a weight. A value is an 8-bit float (E4M3), and 32 of them share a power of two (E8M0), stored as
a byte:

$$\hat w_{enk} = \mathrm{value}_{enk} \; 2^{\,\mathrm{byte}_{en\lfloor k/32 \rfloor} - 127}$$

$$\mathrm{byte} = \lfloor \log_2 m \rfloor - 8 + 127, \qquad
   \mathrm{value} = \mathrm{E4M3}\big(\mathrm{clamp}(w \, 2^{127 - \mathrm{byte}}, \pm 448)\big)$$

Conventions, the same in every function:

* All arithmetic is float32, whatever the dtype of the weights: it defines the bytes. A decoded weight is rounded to
  the wanted dtype once, at the end.
* Nearest means round to nearest; a value half-way between two codes takes the even one (5 -> 4, 3.5 -> 4, 2.5 -> 2).
  A negative value that rounds to zero keeps its sign (E2M1 code 8), as the hardware conversion does.
* Saturation: too large for the grid becomes its largest value. That can happen to NVFP4 where the scale was rounded
  down (a ratio of 6.2 becomes 6) and to MXFP8 for magnitudes above 448/256 of the block's power of two.
* A zero block gets scale byte 0 and zero codes, a zero expert amax 0; both decode to exact zeros. A block so small that
  its scale rounds to zero is flushed to zero.
* NaN and infinity have no code: they are refused, naming the expert.

Source: the tensors `mlp.experts.{w13,w2}_weight` of a checkpoint with the companions `_scale`, `_amax` and
`_outer_scale_denominator` (`stored_layout`).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from .errors import InputError
from .residual import wide

NVFP4, MXFP8 = "nvfp4", "mxfp8"
GROUP = {NVFP4: 16, MXFP8: 32}  # values that share a scale
COMPANIONS = ("_scale", "_amax", "_outer_scale_denominator")  # name endings of the tensors beside a stored weight
E2M1_MAX, E4M3_MAX = 6.0, 448.0
DENOMINATOR = E4M3_MAX * E2M1_MAX
FLOAT32_MAX = torch.finfo(torch.float32).max

# Experts are processed a few at a time, so that temporaries stay near this many weights (16 MiB of float32 each).
_CHUNK_WEIGHTS = 2**22


# ---------------------------------------------------------------- the number formats


def e2m1_round(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The nearest E2M1 value, ties to the even code; magnitudes above 5 become 6."""
    magnitude = x.abs()
    # The grid is uniform on each binade. Dividing by a power of two is exact and torch.round takes ties to even.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign((torch.round(magnitude / step) * step).clamp(max=E2M1_MAX), x)


def e4m3_round(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The nearest E4M3 value, ties to even; magnitudes above 448 become 448 (the bare cast would give NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def e8m0_value(byte: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """2^(byte - 127) in float32, exact for all bytes: 0 is the subnormal 2^-127, 255 is NaN.

    Built from bits: `exp2` need not be exact, and a shift alone turns byte 0 into zero and 255 into infinity.
    """
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _pack_e2m1(values: Float[Tensor, "*rows K"]) -> UInt8[Tensor, "*rows half"]:
    """E2M1 values to bytes of two codes, the even column in the low nibble."""
    magnitude = values.abs()
    code = torch.minimum(torch.minimum(2 * magnitude, magnitude + 2), magnitude / 2 + 4)  # 0..7, piecewise linear
    code = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack_e2m1(codes: UInt8[Tensor, "*rows half"]) -> Float[Tensor, "*rows K"]:
    """Bytes of two codes to float32 values; the inverse of `_pack_e2m1`."""
    # Shifts, not a stack of both halves: `torch.compile` then keeps them out of memory.
    code = (codes[..., None] >> torch.arange(0, 8, 4, dtype=torch.uint8, device=codes.device) & 0xF).flatten(-2)
    index = (code & 7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(index / 2, index - 2), 2 * index - 8)  # no table: nothing to keep on a GPU
    return torch.where(code < 8, magnitude, -magnitude)


# ---------------------------------------------------------------- the mathematics: pure, no checks, torch.compile-safe


def _scalar(value: float, like: Tensor) -> Float[Tensor, ""]:
    # Dividing a CUDA tensor by a Python number multiplies by its reciprocal, which is one ulp off now and then;
    # dividing by a tensor on the same device divides. Filled, not copied from the host: a CUDA graph can record it.
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _nvfp4_round(
    blocks: Float[Tensor, "*rows blocks 16"], amax: Float[Tensor, "..."], denominator: Float[Tensor, ""], target: float
) -> tuple[Float[Tensor, "*rows blocks 16"], Float[Tensor, "*rows blocks 1"]]:
    """E2M1 values and E4M3 scales that put each block's largest magnitude at `target`; amax broadcasts over blocks."""
    amax = torch.where(amax > 0, amax, 1.0)  # a zero expert: 0 / 0 would be NaN
    scale = e4m3_round(blocks.abs().amax(-1, keepdim=True) / _scalar(target, blocks) * denominator / amax)
    unit = scale * (amax / denominator)
    return e2m1_round(torch.where(unit > 0, blocks / unit, 0.0)), scale


def _four_over_six(
    w: Float[Tensor, "E N K"], denominator: float, amax: Float[Tensor, " E"] | None = None
) -> tuple[Float[Tensor, "E N blocks 16"], Float[Tensor, "E N blocks 1"], Float[Tensor, " E"], Float[Tensor, ""]]:
    """E2M1 values, E4M3 scales, amax and denominator as float32; each block takes the better of the targets 6 and 4."""
    blocks = w.to(torch.float32).unflatten(-1, (-1, GROUP[NVFP4]))
    amax = blocks.abs().amax((1, 2, 3)) if amax is None else amax
    per_block, outer = amax[:, None, None, None], _scalar(denominator, blocks)

    def squared_error(values: Tensor, scale: Tensor) -> Tensor:
        # This order of operations is the rule: algebraically equal forms differ in the last bit and flip near-ties.
        # So does the order of summation; a tree of halves is the same on every device, `sum` is not.
        error = (values * scale * per_block / outer - blocks) ** 2
        while (n := error.shape[-1]) > 1:
            error = error[..., : n // 2] + error[..., n // 2 :]
        return error

    six, four = (_nvfp4_round(blocks, per_block, outer, target) for target in (6.0, 4.0))
    take_four = squared_error(*four) < squared_error(*six)
    return torch.where(take_four, four[0], six[0]), torch.where(take_four, four[1], six[1]), amax, outer


def _mxfp8_round(
    blocks: Float[Tensor, "*rows blocks 32"],
) -> tuple[Float[Tensor, "*rows blocks 32"], Shaped[Tensor, "*rows blocks 1"]]:
    """E4M3 values, as floats, and E8M0 bytes, as int32."""
    largest = blocks.abs().amax(-1, keepdim=True)
    # frexp gives largest = f * 2^e with 1/2 <= f < 1, so floor(log2 largest) = e - 1 exactly; log2 may round up.
    byte = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - 8 + 127, 0).clamp(0, 254)
    scaled = blocks * e8m0_value(254 - byte)  # 2^(127 - byte): the reciprocal is exact
    # An infinity would saturate to a small finite value, as frexp gives it the exponent 0. NaN passes on by itself.
    return e4m3_round(torch.where(largest.isinf(), torch.nan, scaled)), byte


def nvfp4_encode(
    w: Float[Tensor, "E N K"], amax: Float[Tensor, " E"], denominator: float = DENOMINATOR
) -> tuple[UInt8[Tensor, "E N half"], Float[Tensor, "E N blocks"]]:
    """Codes and scales of `nvfp4_quantize` without its checks and chunks, for known maxima: no synchronisation."""
    values, scales, _, _ = _four_over_six(w, denominator, amax)
    return _pack_e2m1(values.flatten(-2)), scales[..., 0].to(torch.float8_e4m3fn)


def mxfp8_encode(w: Float[Tensor, "E N K"]) -> tuple[Float[Tensor, "E N K"], UInt8[Tensor, "E N blocks"]]:
    """`mxfp8_quantize` without its checks and chunks: no synchronisation."""
    values, scales = _mxfp8_round(w.to(torch.float32).unflatten(-1, (-1, GROUP[MXFP8])))
    return values.flatten(-2).to(torch.float8_e4m3fn), scales[..., 0].to(torch.uint8)


def nvfp4_decode(
    codes: UInt8[Tensor, "E N half"],
    scales: Float[Tensor, "E N blocks"],
    amax: Float[Tensor, " E"],
    denominator: Float[Tensor, ""],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "E N K"]:
    """`nvfp4_dequantize` without its checks: no synchronisation, for use inside a forward pass."""
    values = _unpack_e2m1(codes).unflatten(-1, (-1, GROUP[NVFP4])) * scales.to(torch.float32)[..., None]  # exact
    return (values * (amax / denominator)[:, None, None, None]).flatten(-2).to(dtype)


def mxfp8_decode(
    values: Float[Tensor, "E N K"], scales: UInt8[Tensor, "E N blocks"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "E N K"]:
    """`mxfp8_dequantize` without its checks: no synchronisation, for use inside a forward pass."""
    blocks = values.to(torch.float32).unflatten(-1, (-1, GROUP[MXFP8]))
    return (blocks * e8m0_value(scales)[..., None]).flatten(-2).to(dtype)


# ---------------------------------------------------------------- stored tensors


def stored_layout(
    quantisation: str, shape: tuple[int, ...], name: str = "weight"
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that store a weight [E, N, K]: suffix of the name -> (dtype, shape).

    Raises:
        InputError: if K is no multiple of the block size. The block size is a constant of the format: guessing it
            from the number of scale columns would misalign every block of a padded tensor.
    """
    group = GROUP[quantisation]
    if len(shape) != 3 or 0 in shape or shape[2] % group:
        raise InputError(
            f"{name}: a weight of shape {list(shape)} cannot be {quantisation.upper()}, "
            f"expected [E, N, K] with K a multiple of {group}"
        )
    E, N, K = shape
    if quantisation == NVFP4:
        return {
            "": (torch.uint8, (E, N, K // 2)),
            "_scale": (torch.float8_e4m3fn, (E, N, K // group)),
            "_amax": (torch.float32, (E,)),
            "_outer_scale_denominator": (torch.float32, ()),
        }
    return {"": (torch.float8_e4m3fn, (E, N, K)), "_scale": (torch.uint8, (E, N, K // group))}


def check_stored(quantisation: str, tensors: dict[str, Tensor], name: str = "weight") -> None:
    """Refuse stored tensors that have no meaning. Keys are suffixes as in `stored_layout`; reads values, so it
    synchronises with a GPU.

    Raises:
        InputError: a wrong dtype or shape, a NaN scale or value (named with its expert), an amax that is negative or
            not finite, a denominator that is not positive and finite.
    """
    codes = tensors[""]
    columns = codes.shape[-1] * (2 if quantisation == NVFP4 else 1) if codes.ndim else 0
    for suffix, (dtype, shape) in stored_layout(quantisation, (*codes.shape[:-1], columns), name).items():
        tensor = tensors[suffix]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise InputError(
                f"{name}{suffix}: {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"expected {dtype_name(dtype)} {list(shape)}"
            )
    if quantisation == NVFP4:
        # A sign bit in a scale would be a second sign of the block: no quantiser writes it, so it marks damaged bytes.
        bad = [("_scale", tensors["_scale"].view(torch.uint8) >= 0x7F, "a NaN or negative scale")]
        bad.append(("_amax", ~(tensors["_amax"].isfinite() & (tensors["_amax"] >= 0)), "a negative or non-finite amax"))
        denominator = tensors["_outer_scale_denominator"].item()
        if not 0 < denominator < float("inf"):
            raise InputError(f"{name}_outer_scale_denominator: {denominator}, expected a positive number")
    else:
        bad = [("_scale", tensors["_scale"] == 255, "a NaN scale")]
        bad.append(("", (codes.view(torch.uint8) & 0x7F) == 0x7F, "a NaN value"))
    for suffix, wrong, what in bad:
        experts = wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong
        if experts.any():
            first = int(experts.nonzero()[0])
            raise InputError(f"{name}{suffix}: expert {first} holds {what}, expected finite numbers")


def nvfp4_quantize(
    w: Tensor, denominator: float = DENOMINATOR, name: str = "weight"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode w [E, N, K] as NVFP4, four over six.

    Returns: codes uint8 [E, N, K/2], scales float8_e4m3fn [E, N, K/16], amax float32 [E], denominator float32 [].

    Raises:
        InputError: naming `name`: K is no multiple of 16; an expert holds NaN, infinity or a magnitude above
            3.4e38 / denominator (its scale would overflow); a denominator that is not positive.
    """
    limit = nvfp4_limit(denominator, name)
    check_weight(NVFP4, w, name)
    amax = torch.stack([rows.abs().amax() for rows in w]).to(torch.float32)
    for expert, largest in enumerate(amax.tolist()):
        check_largest(largest, limit, expert, name)
    parts = [nvfp4_encode(w[chunk], amax[chunk], denominator) for chunk in _chunks(w)]
    codes, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, scales, amax, _scalar(denominator, amax)


def nvfp4_dequantize(
    codes: Tensor, scales: Tensor, amax: Tensor, denominator: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Decode NVFP4: codes [E, N, K/2], scales [E, N, K/16], amax [E], denominator [] to weights [E, N, K].

    Raises:
        InputError: as `check_stored`.
    """
    stored = {"": codes, "_scale": scales, "_amax": amax, "_outer_scale_denominator": denominator}
    return dequantize_stored(NVFP4, stored, dtype)


def mxfp8_quantize(w: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Encode w [E, N, K] as MXFP8.

    Returns: values float8_e4m3fn [E, N, K], scales uint8 [E, N, K/32].

    Raises:
        InputError: naming `name`: K is no multiple of 32, or an expert holds NaN or infinity.
    """
    check_weight(MXFP8, w, name)
    for expert, rows in enumerate(w):
        check_largest(rows.abs().amax().item(), FLOAT32_MAX, expert, name)
    parts = [mxfp8_encode(w[chunk]) for chunk in _chunks(w)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, scales


def mxfp8_dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode MXFP8: values [E, N, K], scales [E, N, K/32] to weights [E, N, K].

    Raises:
        InputError: as `check_stored`.
    """
    return dequantize_stored(MXFP8, {"": values, "_scale": scales}, dtype)


def quantize_stored(quantisation: str, w: Tensor, name: str = "weight") -> dict[str, Tensor]:
    """`nvfp4_quantize` or `mxfp8_quantize` as a mapping from the suffixes of `stored_layout`."""
    tensors = nvfp4_quantize(w, name=name) if quantisation == NVFP4 else mxfp8_quantize(w, name)
    return dict(zip(stored_layout(quantisation, tuple(w.shape), name), tensors, strict=True))


def dequantize_stored(
    quantisation: str, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32, name: str = "weight"
) -> Tensor:
    """The inverse of `quantize_stored`; needs memory for the result and a few experts.

    Raises:
        InputError: as `check_stored`.
    """
    check_stored(quantisation, tensors, name)
    codes, scales = tensors[""], tensors["_scale"]
    out = torch.empty(*codes.shape[:2], scales.shape[2] * GROUP[quantisation], dtype=dtype, device=codes.device)
    for chunk in _chunks(out):
        if quantisation == NVFP4:
            outer = tensors["_amax"][chunk], tensors["_outer_scale_denominator"]
            out[chunk] = nvfp4_decode(codes[chunk], scales[chunk], *outer, dtype)
        else:
            out[chunk] = mxfp8_decode(codes[chunk], scales[chunk], dtype)
    return out


# ---------------------------------------------------------------- fake quantisation


def fake_nvfp4_weight(w: Float[Tensor, "E N K"], denominator: float = DENOMINATOR) -> Float[Tensor, "E N K"]:
    """What w [E, N, K] becomes once stored as NVFP4, in w's dtype.

    For quantisation-aware training: no checks, no packing, no branch on data, so it runs inside torch.compile. Eagerly
    it equals quantise-then-decode bit for bit on every device; a compiler that fuses multiply and add, or that divides
    approximately, may choose differently on near-ties. It has no useful gradient: pass the gradient straight through.
    """
    check_columns(NVFP4, w)
    values, scales, amax, outer = _four_over_six(w, denominator)
    return (values * scales * (amax / outer)[:, None, None, None]).flatten(-2).to(w.dtype)


def fake_mxfp8_weight(w: Float[Tensor, "E N K"]) -> Float[Tensor, "E N K"]:
    """What w [E, N, K] becomes once stored as MXFP8, in w's dtype; as `fake_nvfp4_weight`."""
    return fake_mxfp8(w)


def fake_nvfp4(x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Activations as an NVFP4 product sees them, in x's dtype: blocks of 16 along the last axis, target 6 only.

    The outer scale is each token's own maximum over 2688. Kernels in use today mostly take one scale for the whole
    tensor, calibrated beforehand; released checkpoints carry no such number, and one computed on the fly would make a
    token depend on its batch: prefill would differ from decoding, and a padded row from the row alone. A scale per
    token factors out of the product just as well. Four over six belongs to weights, which are encoded once.
    """
    check_columns(NVFP4, x)
    blocks = wide(x).unflatten(-1, (-1, GROUP[NVFP4]))
    amax = blocks.abs().amax((-2, -1), keepdim=True)
    outer = _scalar(DENOMINATOR, blocks)
    values, scales = _nvfp4_round(blocks, amax, outer, E2M1_MAX)
    return (values * scales * (amax / outer)).flatten(-2).to(x.dtype)


def fake_mxfp8(x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Activations as an MXFP8 product sees them, in x's dtype: blocks of 32 along the last axis."""
    check_columns(MXFP8, x)
    values, scales = _mxfp8_round(wide(x).unflatten(-1, (-1, GROUP[MXFP8])))
    return (values * e8m0_value(scales)).flatten(-2).to(x.dtype)


# ---------------------------------------------------------------- checks and chunks


def check_columns(quantisation: str, x: Tensor) -> None:
    """Raises InputError if the last axis of x does not consist of whole blocks."""
    columns, group = x.shape[-1], GROUP[quantisation]
    if columns % group:
        raise InputError(f"{quantisation.upper()}: the last axis has {columns} values, expected a multiple of {group}")


def nvfp4_limit(denominator: float, name: str) -> float:
    """The largest magnitude that can be encoded: neither m * denominator / a nor a / denominator may overflow.

    Raises:
        InputError: a denominator that is not positive.
    """
    if not 0 < denominator < float("inf"):
        raise InputError(f"{name}: denominator {denominator}, expected a positive number")
    return FLOAT32_MAX * min(denominator, 1 / denominator)


def check_weight(quantisation: str, w: Tensor, name: str) -> None:
    """Raises InputError for a shape or a dtype that cannot be encoded."""
    stored_layout(quantisation, tuple(w.shape), name)
    if not w.is_floating_point() or w.dtype.itemsize < 2:
        raise InputError(f"{name}: {dtype_name(w.dtype)}, expected a floating-point weight of at least 16 bits")


def check_largest(largest: float, limit: float, expert: int, name: str) -> None:
    """Raises InputError if an expert's largest magnitude is above the limit, infinite or NaN."""
    if not largest <= limit:  # this way round the comparison is false for NaN as well
        raise InputError(f"{name}: expert {expert} holds {largest}, expected magnitudes of at most {limit:.3g}")


def _chunks(w: Tensor) -> Iterator[slice]:
    E, N, K = w.shape
    step = max(1, _CHUNK_WEIGHTS // (N * K))
    return (slice(start, start + step) for start in range(0, E, step))


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16, in messages and manifests."""
    return str(dtype).removeprefix("torch.")
