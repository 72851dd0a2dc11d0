"""The kernels as one backend of the model."""

import torch

from ..backends import Backend
from ..errors import InputError
from . import INTERPRETED
from .attention import attend
from .moe import route
from .residual import mix_and_norm
from .short_conv import dynamic_short_conv, short_conv


def triton_backend() -> Backend:
    """All operations on Triton but the experts' matrix products, which stay the reference (as its report says).

    Raises:
        InputError: without a GPU, unless Triton interprets.
    """
    if not (INTERPRETED or torch.cuda.is_available()):
        raise InputError("backend 'triton': torch sees no GPU here, expected one, or TRITON_INTERPRET=1 (very slow)")
    return Backend(
        mix_and_norm=mix_and_norm,
        short_conv=short_conv,
        dynamic_short_conv=dynamic_short_conv,
        attend=attend,
        route=route,
    )
