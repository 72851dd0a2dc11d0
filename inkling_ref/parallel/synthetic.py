"""Weights made on the device, for timing a rank whose checkpoint is too large to be at hand.

Right in shape, format and size, meaningless in value. They are not zeros (a GPU runs those faster than data) and the
router spreads its tokens. A tensor's seed is its name and place: ranks that hold the same have the same, but the
weights of another plan are others. Where ranks are compared with one device (`in_turn`), they are cut from the whole.
"""

import math
from zlib import crc32

import torch
from torch import Tensor, nn

from ..backends import Backend
from ..checkpoint import MATRICES, ShapesOnly, empty_model, layer_formats
from ..config import InklingConfig
from ..draft_config import DSparkConfig
from ..dspark import Drafter
from ..model import Inkling, keeps_float32
from ..quantization import DENOMINATOR, E2M1_MAX, E4M3_MAX, MXFP8, NVFP4, stored_layout
from .apply import Mesh, parallelize
from .drafter import cut
from .plan import Plan, Share, stored_slices


def synthetic(
    config: InklingConfig,
    mesh: Mesh,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | Backend = "torch",
    experts: str = "nvfp4+mxfp8",
    skew: float = 0.0,
    cut_from_whole: bool = False,
) -> Inkling:
    """A rank's part of a model of `config` with random weights, experts packed in their released format.

    skew: the router's correction bias falls by that much from the first expert to the last, so that low ids, and with
        them the first ranks, are chosen more often. 0 is balanced; the scores themselves lie between 0 and 1.
    cut_from_whole: the weights are this rank's slices of those that `Plan()` has; each tensor is made whole, and cut.
    """
    model, storage = empty_model(config, device, dtype, backend)
    formats = layer_formats(experts, config.text.num_hidden_layers)
    for layer, quantisation in zip(model.llm.layers, formats, strict=True):
        layer.mlp.experts.stored_format = quantisation
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parallelize(model, mesh)
    slices = (Share(config, Plan(), 0) if cut_from_whole else model.share).slices()
    for name, parameter in list(model.named_parameters()):
        generator = _generator(name, slices, storage.device)
        module_name, _, leaf = name.rpartition(".")
        module, shape, held = model.get_submodule(module_name), tuple(parameter.shape), ()
        if cut_from_whole:
            shape, held = whole[name], model.share.slices().get(name, ())
        if leaf in MATRICES and module.stored_format in (NVFP4, MXFP8):
            delattr(module, leaf)
            for suffix, tensor in _packed(module.stored_format, shape, generator).items():
                part = tensor[stored_slices(held, suffix, module.stored_format)]
                module.register_buffer(leaf + suffix, part.clone() if held else part)
            continue
        kept = torch.float32 if keeps_float32(name) and dtype.itemsize < 4 else dtype
        tensor = _random(name, shape, kept, generator)
        if held:
            tensor = tensor[held].clone(memory_format=torch.contiguous_format)
        if name.endswith(".mlp.gate.bias"):
            tensor = torch.linspace(0, -skew, len(tensor), device=storage.device, dtype=kept)
        module.register_parameter(leaf, nn.Parameter(tensor))
    if dtype == torch.bfloat16 and model.backend.pack_experts is not None:  # as `checkpoint.fill` does
        for layer in model.llm.layers:
            if layer.mlp.experts.stored_format in (NVFP4, MXFP8):
                model.backend.pack_experts(layer.mlp.experts)
    return model.requires_grad_(False).eval()


def synthetic_drafter(model: Inkling, config: DSparkConfig | None = None) -> Drafter:
    """A rank's part of a drafter with random weights; None: the sizes of Small's.

    A round costs what a trained one costs; what it drafts is rejected, but for luck.
    """
    with torch.device("meta"), ShapesOnly():
        drafter = Drafter(config or DSparkConfig(), model)
    slices = cut(drafter)
    for name, parameter in list(drafter.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        tensor = _random(name, tuple(parameter.shape), model.dtype, _generator(name, slices, model.device))
        drafter.get_submodule(module_name).register_parameter(leaf, nn.Parameter(tensor))
    return drafter.requires_grad_(False).eval()


def _generator(name: str, slices: dict[str, tuple[slice, ...]], device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(crc32(f"{name} {slices.get(name)}".encode()))


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Scales of about 1; products that keep the size of what they read."""
    tensor = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
    if "norm" in name or name.endswith("clip.scale"):
        return 1 + 0.1 * tensor
    return tensor / math.sqrt(shape[-1]) if len(shape) > 1 else tensor


def _packed(quantisation: str, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """A weight [E, N, columns] with entries of about 1 / sqrt(columns)."""
    device = generator.device

    def bytes_below(count: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(count, size, generator=generator, dtype=torch.uint8, device=device)

    layout = stored_layout(quantisation, (max(shape[0], 1), *shape[1:]))
    sizes = {s: (shape[0], *size[1:]) if size else size for s, (_, size) in layout.items()}  # a rank may have no expert
    size = 1 / math.sqrt(shape[-1])
    if quantisation == NVFP4:
        scales = (256 * (1 + torch.rand(sizes["_scale"], generator=generator, device=device))).clamp(max=E4M3_MAX)
        return {
            "": bytes_below(256, sizes[""]),
            "_scale": scales.to(torch.float8_e4m3fn),
            "_amax": torch.full(sizes["_amax"], size * E2M1_MAX, device=device),
            "_outer_scale_denominator": torch.tensor(DENOMINATOR, device=device),
        }
    values = bytes_below(0x7F, sizes[""])  # all but the two NaNs
    values |= bytes_below(2, sizes[""]).mul_(0x80)  # in place: of a whole layer they are 8 GB
    byte = 127 + round(math.log2(size)) - 7
    return {"": values.view(torch.float8_e4m3fn), "_scale": byte - bytes_below(2, sizes["_scale"])}
