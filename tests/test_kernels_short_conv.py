"""Contract of the short convolutions' kernels, and of what all kernels share."""

from types import SimpleNamespace

import pytest
import torch
from helpers import relative_rms, unchecked
from kernel_contract import DEVICE, check, dtypes, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused, kernels, short_conv
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


def test_rolling_reads_strided_rejected():
    rejected = torch.tensor([[2, 0], [0, 9], [1, 9]], device=DEVICE)[:, 0]
    x, weight, state = torch.randn(3, 2, 12), torch.randn(12, 1, 3), torch.randn(3, 5, 12)
    x, weight, state = (t.to(DEVICE) for t in (x, weight, state))
    expected = fused.rolling_short_conv(x, state.clone(), weight, rejected)
    assert relative_rms(short_conv_kernel.rolling_short_conv(x, state, weight, rejected), expected) < 1e-6


REFUSED = {  # T, K, rows of the state, distance of its channels, and the message
    "strided": (2, 4, 3, 2, "channels 2 apart, expected adjacent"),
    "more rows than tokens": (17, 4, 18, 1, "a state of 18 rows, expected at most the call's 17"),
    "longer than a run": (40, 12, 11, 1, "12 taps on a state, expected at most 9"),
}


@pytest.mark.parametrize(("T", "K", "N", "apart", "message"), REFUSED.values(), ids=REFUSED)
def test_a_state_is_refused(T, K, N, apart, message):
    state = torch.zeros(1, N, 8 * apart, device=DEVICE)[..., ::apart]
    x, weight = torch.randn(1, T, 8, device=DEVICE), torch.randn(8, 1, K, device=DEVICE)
    with pytest.raises(InputError, match=f"^triton rolling_short_conv: .*{message}"):
        short_conv_kernel.rolling_short_conv(x, state, weight)


def test_many_taps_in_a_short_call_or_without_a_state():
    x, weight, state = torch.randn(1, 16, 8), torch.randn(8, 1, 12), torch.randn(1, 17, 8)
    check(
        lambda x, weight, state: short_conv_kernel.rolling_short_conv(x, state.clone(), weight),
        lambda x, weight, state: fused.rolling_short_conv(x, state.clone(), weight),
        {"x": x, "weight": weight, "state": state}, torch.float32,
    )  # fmt: skip
    check(
        short_conv_kernel.short_conv, short_conv.short_conv, {"u": torch.randn(1, 51, 8), "weight": weight},
        torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize(("capability", "expected"), [((8, 9), False), ((9, 0), True), ((12, 0), True)], ids=str)
def test_dependent_launches_need_hopper(capability, expected, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels.dependent.__wrapped__(torch.device("cuda", 0)) is expected


def test_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ids = SimpleNamespace(dtype=torch.int32, shape=(3,), device=torch.device("cuda", 1))
    with unchecked(), pytest.raises(InputError, match=r"^triton op: ids on cuda:1, expected cuda:0"):
        kernels.expect("op", kernels.INTEGERS, ids=(ids, (3,)))
