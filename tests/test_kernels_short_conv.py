"""Contract of the short convolutions' kernels."""

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, check, dtypes, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused, short_conv
from inkling_ref.errors import InputError
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


ROLLING = {  # B, T, C, K, N, whether drafted tokens were rejected
    "one token": (3, 1, 10, 4, 3, False), "drafted": (4, 5, 530, 4, 8, True), "K 3, more rows": (2, 2, 15, 3, 7, True),
    "longer than a run": (2, 19, 33, 4, 6, True),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize(("B", "T", "C", "K", "N", "some"), ROLLING.values(), ids=ROLLING)
def test_rolling(B, T, C, K, N, some, dtype):
    rejected = torch.arange(B, device=DEVICE).remainder(N - K + 2) if some else None
    x, weight, states = torch.randn(B, T, C), torch.randn(C, 1, K), []

    def once(function):
        def call(x, weight, state):
            states.append(state.clone())
            return function(x, states[-1], weight, rejected)

        return call

    tensors = {"x": x, "weight": weight, "state": torch.randn(B, N, C)}
    check(once(short_conv_kernel.rolling_short_conv), once(fused.rolling_short_conv), tensors, dtype)
    _exact, eager, actual = states
    assert torch.equal(actual, eager)  # moved, not computed


def test_rolling_equals_one_call():
    # Token by token from zeros, with two rejected drafts, as over the whole sequence.
    x, weight = torch.randn(2, 9, 12, device=DEVICE), torch.randn(12, 1, 4, device=DEVICE)
    expected = short_conv.short_conv(torch.nn.functional.pad(x, (0, 0, 3, 0)), weight)
    state = torch.zeros(2, 5, 12, device=DEVICE)
    rejected = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for t in range(7):
        draft = x[:, t : t + 3]
        actual = short_conv_kernel.rolling_short_conv(draft, state, weight, rejected)
        assert relative_rms(actual, expected[:, t : t + 3]) < 1e-6
        rejected.fill_(2)


def test_a_long_state_is_refused():
    x, weight = torch.randn(1, 2, 8, device=DEVICE), torch.randn(8, 1, 4, device=DEVICE)
    with pytest.raises(InputError, match="a state of 17 rows, expected at most 16"):
        short_conv_kernel.rolling_short_conv(x, torch.zeros(1, 17, 8, device=DEVICE), weight)
