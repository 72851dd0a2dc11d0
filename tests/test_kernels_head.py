"""Contract of the logits head: its random numbers, its choices, its ties."""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers import unchecked
from kernel_contract import DEVICE, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused
from inkling_ref.errors import InputError
from inkling_ref.kernels import head

pytestmark = needs_device

SHAPES = {"one row": (1, 37, 300), "less than a tile": (5, 130, 99), "more rows than a tile": (67, 96, 257)}  # N, D, V
shapes = pytest.mark.parametrize(("N", "D", "V"), SHAPES.values(), ids=SHAPES)


def integers(*shape, dtype=torch.float32):
    """Small whole numbers: their products and sums are exact in every order, and often equal."""
    return placed(torch.randint(-2, 3, shape), torch.int64).to(dtype)


def keys(N):
    """Seeds with all 64 bits, positions beyond 32."""
    return torch.randint(-(2**63), 2**63 - 1, (N,)).to(DEVICE), (torch.arange(N) * 2**30).to(DEVICE)


# --- Random numbers --------------------------------------------------------------------------------------------------


def test_philox_gives_the_published_numbers():
    # Known answers of the authors' Random123 distribution (kat_vectors, philox4x32 10).
    ones = 0xFFFFFFFF
    cases = {
        ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((ones, ones, ones, ones), (ones, ones)): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)): (
            0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
        ),
    }  # fmt: skip
    for (counter, key), words in cases.items():
        counter, key = (tuple(torch.tensor(n) for n in group) for group in (counter, key))
        assert tuple(int(word) for word in fused.philox(counter, key)) == words


@triton.jit
def _store_uniform(out_ptr, seed_ptr, position_ptr, first, V: tl.constexpr, N: tl.constexpr):
    rows = tl.arange(0, N)
    u = head.uniform(first, V, tl.load(seed_ptr + rows), tl.load(position_ptr + rows))
    tl.store(out_ptr + tl.arange(0, V)[:, None] * N + rows[None, :], u)


def test_kernel_draws_what_the_reference_draws():
    V, N, first = 64, 8, 200_000
    seeds, positions = keys(N)
    out = torch.empty(V, N, device=DEVICE)
    _store_uniform[(1,)](out, seeds, positions, first, V=V, N=N)
    assert torch.equal(out.t(), fused.uniform(first + V, seeds, positions)[:, first:])


def test_random_numbers_are_uniform_and_depend_on_all_that_they_should():
    seeds, positions = torch.tensor([7, 7, 7 + 2**32, 7]), torch.tensor([3, 4, 3, 3 + 2**32])
    u = fused.uniform(100_003, seeds, positions)
    assert u.dtype == torch.float32
    assert u.min() > 0
    assert u.max() <= 1
    # Standard errors: 0.0009 of a mean, 0.003 of a correlation.
    assert (u.double().mean(1) - 0.5).abs().max() < 0.004
    assert (torch.corrcoef(u.double()) - torch.eye(4)).abs().max() < 0.015
    neighbours = torch.corrcoef(torch.stack([u[0, i : 100_000 + i : 4] for i in range(4)]).double())
    assert (neighbours - torch.eye(4)).abs().max() < 0.03


def test_choices_are_distributed_as_the_softmax():
    logits, rows = torch.tensor([1.5, -1.0, 0.0, 1.4, -40.0, 0.3, 0.0]), 40_000
    p = (logits / 0.7).softmax(0)
    seeds, positions = torch.arange(rows) % 100, torch.arange(rows)
    tokens = fused.choose(logits.expand(rows, -1), 0.7, seeds, positions)
    counts = torch.bincount(tokens, minlength=7)
    assert ((counts - rows * p).abs() < 5 * (rows * p * (1 - p)).sqrt() + 1e-3).all()


# --- Choices ---------------------------------------------------------------------------------------------------------


@dtypes
@shapes
def test_greedy_of_exact_sums(N, D, V, dtype):
    hidden, weight = integers(N, D, dtype=dtype), integers(V, D, dtype=dtype)
    weight[V // 2 :] = weight[: V - V // 2].clone()  # every score stands there twice
    tokens, logits = head.sample_head(hidden, weight, 30.0, first=11)
    exact, exact_logits = fused.sample_head(hidden.double(), weight.double(), 30.0, first=11)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, exact)
    assert logits.dtype == torch.float64
    assert torch.equal(logits, exact_logits)


@dtypes
@shapes
@pytest.mark.parametrize("temperature", [1e-45, 0.3, 4.0])
def test_sampling_is_the_reference(N, D, V, temperature, dtype):
    hidden, weight, (seeds, positions) = integers(N, D, dtype=dtype), integers(V, D, dtype=dtype), keys(N)
    found = head.sample_head(hidden, weight, 30.0, temperature, seeds, positions)
    exact = fused.sample_head(hidden.double(), weight.double(), 30.0, temperature, seeds, positions)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, exact, strict=True))


def test_the_cap_comes_before_the_temperature():
    # Logits 0 and 3000, capped 0 and 30: at temperature 30 the first is drawn in a share 1 / (1 + e) of the rows.
    N = 1000
    hidden, weight, (seeds, positions) = torch.ones(N, 20), torch.tensor([[0.0], [150.0]]).expand(2, 20), keys(N)
    tokens, _ = head.sample_head(hidden.to(DEVICE), weight.to(DEVICE), 30.0, 30.0, seeds, positions)
    assert abs(float((tokens == 0).double().mean()) - 1 / (1 + math.e)) < 0.07


def test_rows_draw_the_same_in_any_batch():
    hidden, weight, (seeds, positions) = placed(torch.randn(21, 40)), placed(torch.randn(300, 40)), keys(21)
    together = head.sample_head(hidden, weight, 30.0, 1.0, seeds, positions)
    for i in (0, 20):
        x, seed, position = (t[i : i + 1] for t in (hidden, seeds, positions))
        alone = head.sample_head(x, weight, 30.0, 1.0, seed, position)
        assert [float(t) for t in alone] == [float(t[i]) for t in together]


def test_ties_zeros_nan_and_infinity():
    # Rows of hidden select a column of the weight: the logits are those columns.
    columns = [[1, 3, 3, 2], [-0.0, 0.0, -1, 0], [-5, -5, -5, -5], [300, 400, 500, 400], [1, math.inf, 2, math.inf]]
    weight = torch.tensor(columns, device=DEVICE).t().contiguous()
    hidden = torch.eye(5, device=DEVICE)
    hidden[4, :4] = 0
    weight[:, 4] = 1
    assert head.sample_head(hidden, weight, 30.0)[0].tolist() == [1, 0, 0, 2, 0]
    nan = torch.tensor([[1.0], [math.nan], [math.inf], [math.nan]], device=DEVICE)
    for sign in (1, -1):
        token, logit = head.sample_head(sign * torch.ones(1, 1, device=DEVICE), nan, 30.0)
        assert (int(token), math.isnan(logit)) == (1, True)


def test_refuses_to_draw_without_seeds():
    hidden, weight = torch.ones(1, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    for function in (head.sample_head, fused.sample_head):
        with pytest.raises(InputError, match=r"temperature is 0\.5 without seeds and positions, expected one"):
            function(hidden, weight, 30.0, 0.5)
        with pytest.raises(InputError, match=r"temperature is -1.0, expected a finite number >= 0"):
            function(hidden, weight, 30.0, -1.0)


def test_seeds_and_positions_of_any_integers():
    seeds, positions = torch.tensor([3, -8, 5], dtype=torch.int32), torch.tensor([2, 0, 9], dtype=torch.int32)
    assert torch.equal(fused.uniform(9, seeds, positions), fused.uniform(9, seeds.long(), positions.long()))
    with pytest.raises(InputError, match="temperature is nan, expected a finite number"):
        fused.choose(torch.zeros(1, 3), math.nan, seeds[:1], positions[:1])


def test_only_the_used_rows_of_the_weight_count():
    weight = placed(torch.randn(150, 24))
    weight[137:] = 100  # would win
    hidden = placed(torch.rand(9, 24))
    tokens, logits = head.sample_head(hidden, weight[:137], 30.0)
    assert tokens.max() < 137
    assert torch.allclose(logits, (hidden @ weight[:137].t()).amax(1).double())


@pytest.mark.parametrize("N", [1, 67])
@pytest.mark.parametrize("ranks", [1, 3])
def test_elect(ranks, N):
    # One message, of which they are parts: rows apart.
    tokens = (torch.arange(ranks)[:, None] * 2**40 + torch.arange(3 * N)).to(DEVICE)[:, N : 2 * N]
    choices = torch.tensor([-1.5, -0.0, 0.0, 7.0, 7.0, 1e300, math.inf, -math.inf, math.nan], dtype=torch.float64)
    logits = choices[torch.randint(len(choices), (ranks, N))].to(DEVICE)
    assert torch.equal(head.elect(tokens, logits, -1), fused.elect(tokens, logits, -1))


def test_elect_of_a_tie_nan_and_infinity():
    inf, nan = math.inf, math.nan
    logits = [[1, 2, nan, inf, -inf, -0.0, 5], [2, 2, 3, 9, -inf, 0.0, nan], [0, 1, nan, inf, -4, -1, nan]]
    tokens = torch.arange(21, device=DEVICE).view(3, 7)
    expected = [7, 1, -1, -1, 18, 5, -1]
    for function in (head.elect, fused.elect):
        assert function(tokens, torch.tensor(logits, dtype=torch.float64, device=DEVICE), -1).tolist() == expected


def test_elect_refuses_what_does_not_go_together():
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=DEVICE)
    for logits in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64)):
        with unchecked(), pytest.raises(InputError, match=r"triton elect: logits .+ expected "):
            head.elect(tokens, logits.to(DEVICE), -1)
