"""What the tests of the model's components share: one error measure, random weights, short calls."""

import math

import torch
from torch import Tensor

from inkling_ref.config import InklingConfig
from inkling_ref.model import Inkling


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Relative RMS error in float64; infinite for NaN or Inf, so that no comparison passes by accident."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    return float((actual - expected).norm() / expected.norm())


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters under which every term of the model matters.

    Projections keep about unit variance, so that clips and soft caps of `tests` configs act on some tokens and not on
    others; mixture queries give scores of standard deviation 1.5; no bias, tap, scale or norm weight is neutral.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_pre.weight", "clip.scale", "gamma")):
            value = 1 + 0.3 * noise
        elif ".attn_res." in name:
            value = 1.5 * noise
        elif name.endswith("sconv.weight") or name.endswith("static_w"):
            value = 0.7 * noise
        elif name.endswith("bias"):
            value = 0.2 * noise
        elif name.endswith("proj") or "embed" in name and noise.dim() < 3 and "patch" not in name:
            value = noise if "unembed" not in name else 3 * noise / math.sqrt(p.shape[-1])
        else:  # matrices, [rows, columns]
            value = 1.5 * noise / math.sqrt(p.shape[-1])
        p.data.copy_(value)


def random_model(config: InklingConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> Inkling:
    """A model of `config` (default: tiny) with `randomize`d weights; the same values in every dtype, rounded."""
    model = Inkling(config or InklingConfig.tiny()).eval().requires_grad_(False).double()
    randomize(model, seed)
    return model.cast(dtype)


def random_ids(*shape: int, seed: int = 0, vocabulary: int = 39) -> Tensor:
    """Token ids below tiny's image token."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def logits(model: Inkling, ids: Tensor, **kwargs) -> Tensor:
    with torch.inference_mode():
        return model(ids, **kwargs).logits
