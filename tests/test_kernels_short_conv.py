"""Contract of the short convolutions' kernels."""

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, check, dtypes, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import short_conv
from inkling_ref.kernels import short_conv as short_conv_kernel

pytestmark = needs_device


CONVOLUTIONS = {  # B, T, C, G, K
    "decode": (3, 1, 10, 5, 4), "below a run": (2, 7, 96, 3, 4), "a run and one more": (1, 17, 530, 2, 4),
    "two runs, K 3": (2, 32, 15, 3, 3), "released width": (1, 2, 4608, 9, 4),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(("B", "T", "C", "G", "K"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(B, T, C, G, K, documents, dtype):
    position = torch.arange(T, device=DEVICE).remainder(5).expand(B, T) if documents else None
    u = torch.randn(B, T + K - 1, C)
    static = {"u": u, "weight": torch.randn(C, 1, K)}
    check(short_conv_kernel.short_conv, short_conv.short_conv, static, dtype, document_position=position)
    dynamic = {"u": u, "dynamic_taps": torch.randn(B, T, G, K), "static": torch.randn(K, C)}
    check(
        short_conv_kernel.dynamic_short_conv, short_conv.dynamic_short_conv, dynamic, dtype, document_position=position
    )


def test_convolution_reads_the_end_of_a_state():
    # `with_history` gives a slice of the rolling state.
    state = torch.randn(2, 40, 11, device=DEVICE)
    weight = torch.randn(11, 1, 4, device=DEVICE)
    actual = short_conv_kernel.short_conv(state[:, 30:], weight)
    assert relative_rms(actual, short_conv.short_conv(state[:, 30:].double(), weight.double())) < 1e-6
