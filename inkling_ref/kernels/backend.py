"""The kernels as one backend of the model."""

from dataclasses import fields

import torch

from ..backends import Backend
from ..decode_step import StepBackend
from ..errors import InputError
from . import INTERPRETED
from .attention import attend
from .decode import attend_cache
from .dspark import draft_rnn
from .embedding import embed_and_norm
from .experts import experts
from .head import elect, sample_head
from .moe import route
from .packing import pack_layer
from .projections import project
from .qkv import prepare_qkv
from .quantization import fake_mxfp8, fake_nvfp4, quantize_stored
from .residual import join_and_mix, mix_and_norm
from .short_conv import dynamic_short_conv, short_conv


def triton_backend() -> Backend:
    """All operations on Triton.

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
        experts=experts,
        fake_nvfp4=fake_nvfp4,
        fake_mxfp8=fake_mxfp8,
        quantize_stored=quantize_stored,
        pack_experts=None if INTERPRETED or torch.cuda.get_device_capability()[0] != 9 else pack_layer,
    )


def triton_step_backend() -> StepBackend:
    """The operations of a decoding step with fixed addresses, all on Triton.

    Raises:
        InputError: as `triton_backend`.
    """
    model = triton_backend()
    ops = {field.name: getattr(model, field.name) for field in fields(Backend)}
    return StepBackend(
        **ops,
        embed_and_norm=embed_and_norm,
        project=project,
        prepare_qkv=prepare_qkv,
        attend_cache=attend_cache,
        join_and_mix=join_and_mix,
        sample_head=sample_head,
        elect=elect,
        draft_rnn=draft_rnn,
    )
