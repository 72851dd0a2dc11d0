"""Keys, values and convolution states between calls: appending, cropping, forking, and what is kept how long."""

import copy
import io
import pickle

import pytest
import torch
from helpers import Spy, assert_same_contents, contents, logits, random_ids, random_model, relative_rms, unchecked

from inkling_ref import moe
from inkling_ref.backends import Backend
from inkling_ref.config import SLIDING, InklingConfig
from inkling_ref.errors import InputError

T = 40
W = InklingConfig.tiny().text.sliding_window_size  # 8


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, T)


@pytest.fixture(scope="module")
def full(model, ids):
    return logits(model, ids)


def one_by_one(h, weights, ids, *rest):
    rows = zip(h[:, None], weights[:, None], ids[:, None], strict=True)
    return torch.cat([moe.experts(*row, *rest) for row in rows])


@pytest.fixture(scope="module")
def exact_model():
    """The model whose experts see one token at a time.

    Else the size of an expert's matrix product, and with it the last bit of a token's result, would depend on where
    the other tokens of the call are routed.
    """
    return random_model(backend=Backend(experts=one_by_one))


def filled(model, ids, *splits, **kwargs):
    """A cache that saw `ids` in pieces that end at `splits` and at the end."""
    cache = model.new_cache(len(ids), **kwargs)
    for start, end in zip((0, *splits), (*splits, ids.shape[1]), strict=True):
        logits(model, ids[:, start:end], cache=cache)
    return cache


# --- Crop and fork -------------------------------------------------------------------------------------------------


@unchecked()
def test_crop_to_every_length(model, ids, full):
    """Inside the newest call, and into the reserve before it; then onwards, with the logits of the full forward."""
    for length in range(T):
        cache = filled(model, ids, T - 7) if length >= 5 else filled(model, ids)
        cache.crop(length)
        assert cache.lengths == [length] * 2
        again = logits(model, ids[:, length:], cache=cache)
        assert relative_rms(again, full[:, length:]) < 1e-5, length


@unchecked()
def test_crop_leaves_no_trace_of_what_was_cropped(exact_model, ids):
    """Bit-equal states, whichever tokens were taken back: tokens of a prefill, of a block and of single steps."""
    model = exact_model
    for length in (0, 1, 2, 3, W - 1, W, W + 1, 25):
        caches = []
        for seed in (1, 2):
            other = ids.clone()
            other[:, length:] = random_ids(2, T - length, seed=seed)
            splits = (length + 4, length + 8) if length else ()
            cache = filled(model, other[:, : length + 9], *splits)
            cache.crop(length)
            caches.append(cache)
        assert_same_contents(model, *caches)
        clean = model.new_cache(2)
        if length:
            logits(model, ids[:, :length], cache=clean)
            assert_same_contents(model, caches[0], clean, 1e-5)


def test_crop_of_rows_to_different_lengths(model, ids, full):
    cache = filled(model, ids, 20, 30)
    cache.crop([33, 27])
    assert cache.lengths == [33, 27]
    assert cache.length == 33
    again = logits(model, torch.stack([ids[0, 33:36], ids[1, 27:30]]), cache=cache)
    assert relative_rms(again[0], full[0, 33:36]) < 1e-5
    assert relative_rms(again[1], full[1, 27:30]) < 1e-5
    cache.crop([34, 28])
    for t in range(6):  # decode on, each row at its own position
        step = logits(model, torch.stack([ids[0, 34 + t : 35 + t], ids[1, 28 + t : 29 + t]]), cache=cache)
        assert relative_rms(step[0, 0], full[0, 34 + t]) < 1e-5
        assert relative_rms(step[1, 0], full[1, 28 + t]) < 1e-5


def test_crop_refuses_what_it_cannot_do(model, ids):
    cache = filled(model, ids, 20, rollback=6)
    cache.crop(T)  # nothing to do
    for length, words in [(T + 1, "cannot be cropped"), (-1, "cannot be cropped"), (13, "rollback"), ([30], "rows")]:
        with pytest.raises(InputError, match=words):
            cache.crop(length)
        assert cache.lengths == [T, T]
    cache.crop(14)
    assert cache.lengths == [14, 14]


def test_rollback_reserve(model, ids, full):
    """`rollback` tokens before the newest call can be taken back, and not one more."""
    for rollback in (0, 1, 5):
        cache = filled(model, ids, 33, rollback=rollback)
        with pytest.raises(InputError, match="oldest length kept"):
            cache.crop(33 - rollback - 1)
        cache.crop(33 - rollback)
        again = logits(model, ids[:, 33 - rollback :], cache=cache)
        assert relative_rms(again, full[:, 33 - rollback :]) < 1e-5
    with pytest.raises(InputError, match="rollback"):
        model.new_cache(1, rollback=-1)
    with pytest.raises(InputError, match="batch_size"):
        model.new_cache(0)


def test_fork_is_independent(model, ids, full):
    """Extend and crop both in turn: each goes on as if it were alone."""
    for at in (1, 4, W, 19):
        cache = filled(model, ids[:, :at])
        fork, before = cache.fork(), contents(model, cache)
        logits(model, random_ids(2, 5, seed=at), cache=fork)
        after = contents(model, cache)
        assert all(torch.equal(before[name], after[name]) for name in before)
        rest = logits(model, ids[:, at : at + 6], cache=cache)
        assert relative_rms(rest, full[:, at : at + 6]) < 1e-5
        fork.crop(at)
        assert (fork.lengths, cache.lengths) == ([at] * 2, [at + 6] * 2)
        rest = logits(model, ids[:, at:], cache=fork)
        assert relative_rms(rest, full[:, at:]) < 1e-5


def test_forks_that_decode_in_turn(model, ids):
    """Three branches of one prefix, one token each in turn, each compared with a full forward of its own text."""
    prefix = filled(model, ids[:, :7], 5)
    texts = [torch.cat([ids[:, :7], random_ids(2, 11, seed=seed)], dim=1) for seed in range(3)]
    branches = [prefix, prefix.fork(), prefix.fork()]
    steps: list[list] = [[], [], []]
    for t in range(7, 18):
        for branch, text, out in zip(branches, texts, steps, strict=True):
            out.append(logits(model, text[:, t : t + 1], cache=branch))
    for text, out in zip(texts, steps, strict=True):
        assert relative_rms(torch.cat(out, dim=1), logits(model, text)[:, 7:]) < 1e-5


@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save", "fork"])
def test_copies_carry_every_state(model, ids, full, copier):
    cache = filled(model, ids[:, :21], 17)
    if copier == "deepcopy":
        other = copy.deepcopy(cache)
    elif copier == "pickle":
        other = pickle.loads(pickle.dumps(cache))
    elif copier == "fork":
        other = cache.fork()
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert_same_contents(model, other, cache)
    cache.crop(18)
    assert relative_rms(logits(model, ids[:, 21:], cache=other), full[:, 21:]) < 1e-5


def test_an_exception_in_the_middle_leaves_the_cache_usable(model, ids, full):
    """The layers before the failing one have been extended, the others not; the committed state is as before."""
    cache = filled(model, ids[:, :15], 9)
    before = contents(model, cache)

    def fail(*_):
        raise RuntimeError("out of memory, say")

    for layer, n in ((2, 1), (3, 11), (1, 25), (2, 4)):
        hook = model.llm.layers[layer].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            logits(model, random_ids(2, n, seed=n), cache=cache)
        hook.remove()
        assert cache.lengths == [15, 15]
        after = contents(model, cache)
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert relative_rms(logits(model, ids[:, 15:], cache=cache), full[:, 15:]) < 1e-5


@pytest.mark.parametrize("forked", [False, True], ids=["itself", "fork"])
def test_a_cache_filled_in_inference_mode_can_be_extended_outside(model, ids, full, forked):
    cache = filled(model, ids[:, :13], 10)  # full layers now have room for twenty positions
    with torch.inference_mode():
        cache = cache.fork() if forked else cache
    for end in (14, 15, 30, T):
        start = cache.length
        with torch.no_grad():
            step = model(ids[:, start:end], cache=cache).logits
        assert relative_rms(step, full[:, start:end]) < 1e-5


def test_dtype_and_bytes():
    for dtype, size in [(torch.bfloat16, 2), (torch.float32, 4)]:
        model = random_model(dtype=dtype)
        cache = model.new_cache(3, rollback=4)
        logits(model, random_ids(3, 11), cache=cache)
        states = [state for layer in cache.layers for state in vars(layer).values()]
        assert {state.data.dtype for state in states} == {dtype}
        assert cache.num_bytes() == size * sum(state.data.numel() for state in states)


# --- cases.md ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_case_01_rejected_drafts_leave_no_trace(exact_model, ids, full, accepted):
    """Prompt of 6, a block of 4, rejection at 0..3 or full accept."""
    model = exact_model
    drafts = ids[:, 6:10].clone()
    drafts[:, accepted:] = (drafts[:, accepted:] + 1) % 39
    cache = filled(model, ids[:, :6])
    logits(model, drafts, cache=cache)
    cache.crop(6 + accepted)

    # The same calls, in which the rejected places are padding: this cache only ever saw the accepted tokens.
    clean = filled(model, ids[:, :6])
    mask = (torch.arange(4) < accepted).expand(2, 4)
    logits(model, torch.where(mask, drafts, 0), cache=clean, attention_mask=mask)
    assert clean.lengths == cache.lengths == [6 + accepted] * 2
    assert_same_contents(model, cache, clean)

    # Cropping what single steps appended leaves bit for bit the cache that never made those steps.
    decoded = filled(model, torch.cat([ids[:, :6], drafts], dim=1), *range(1, 10))
    decoded.crop(6 + accepted)
    assert_same_contents(model, decoded, filled(model, ids[:, : 6 + accepted], *range(1, 6 + accepted)))

    # Nor does it matter how the accepted tokens came.
    stepwise = filled(model, ids[:, : 6 + accepted], *range(6, 6 + accepted))
    assert_same_contents(model, cache, stepwise, 1e-5)

    n = 6 + accepted
    following = [logits(model, ids[:, n : n + 1], cache=c) for c in (cache, clean, stepwise)]
    assert torch.equal(following[0], following[1])
    assert relative_rms(following[0], following[2]) < 1e-5
    assert relative_rms(following[0], full[:, n : n + 1]) < 1e-5


def test_case_02_continuing_a_kept_cache_equals_a_cold_run(model, ids, full):
    """10 tokens served; requests that share them and add 3, or 1; also with drafts taken back in between."""
    kept = filled(model, ids[:, :10])
    for new in (1, 3):
        assert relative_rms(logits(model, ids[:, 10 : 10 + new], cache=kept.fork()), full[:, 10 : 10 + new]) < 1e-5
    drafted = kept.fork()
    logits(model, random_ids(2, 4, seed=3), cache=drafted)
    drafted.crop(10)
    assert relative_rms(logits(model, ids[:, 10:13], cache=drafted), full[:, 10:13]) < 1e-5

    # The comparison sees a forgotten convolution state.
    forgetful = kept.fork()
    for layer in forgetful.layers:
        layer.mlp_conv.data = torch.zeros_like(layer.mlp_conv.data)
    assert relative_rms(logits(model, ids[:, 10:13], cache=forgetful), full[:, 10:13]) > 1e-2


def test_case_05_a_snapshot_is_of_exactly_its_position(model, ids, full):
    """A prompt of 13 as 5 + 8, a second request that shares 8: the snapshot at 8 is cut from that at 13."""
    snapshot = filled(model, ids[:, :13], 5).snapshot()
    snapshot.crop(8)
    assert_same_contents(model, snapshot, filled(model, ids[:, :8]), 1e-5)
    other = torch.cat([ids[:, :8], random_ids(2, 5, seed=9)], dim=1)
    assert relative_rms(logits(model, other[:, 8:], cache=snapshot), logits(model, other)[:, 8:]) < 1e-5

    without_reserve = filled(model, ids[:, :13], 5, rollback=0)
    with pytest.raises(InputError, match="oldest length kept is 5"):
        without_reserve.crop(4)


def test_case_10_what_a_sliding_layer_keeps(ids):
    """W = 8: prefill 6, decode three times, then blocks: every query sees its last W keys, and storage is bounded."""
    spy, rollback = Spy(), 2
    config = InklingConfig.tiny()
    config.text.layer_types = [SLIDING] * 4
    model = random_model(config, backend=spy.backend)
    full = logits(model, ids)
    everything = spy.of("attend")[0]["k"]  # of layer 0, whose keys depend on the position's last tokens only
    cache = model.new_cache(2, rollback=rollback)
    n = 0
    for T_call in (6, 1, 1, 1, 3, 10, 1, 3, 1, 1):
        spy.calls.clear()
        assert relative_rms(logits(model, ids[:, n : n + T_call], cache=cache), full[:, n : n + T_call]) < 1e-5
        arguments = spy.of("attend")[0]
        k, (offset, _), (first, _) = arguments["k"], arguments["offsets"], arguments["first_keys"]
        assert k.shape[2] == offset + T_call  # the call's own keys come last
        oldest = n - (offset - first)
        # The oldest key of a window of 8 leaves when position 8 comes, at length 9; the reserve keeps `rollback` more.
        assert oldest == max(0, n - (W - 1) - rollback)
        assert relative_rms(k[:, :, first:], everything[:, :, oldest : n + T_call]) < 1e-5
        G, d, D = config.text.swa_num_key_value_heads, config.text.swa_head_dim, config.text.hidden_size
        widths = (W - 1 + rollback + T_call) * 2 * G * d + (3 + rollback + T_call) * (2 * G * d + 2 * D)
        assert cache.num_bytes() <= 4 * 2 * 4 * widths  # layers, rows, bytes a number
        n += T_call


@unchecked()
def test_case_12_a_drafter_and_its_target_stay_in_step(model):
    """Twenty rounds that accept 0 to 4 of 4 drafts: both caches end each round with the same tokens.

    After a full accept the drafter lacks its last draft, which it proposed and never read: a crop to the target's
    length is refused, instead of a cache that falls behind.
    """
    drafter, ids, n = random_model(seed=1), random_ids(2, 70, seed=12), 5
    ours, drafts = filled(model, ids[:, :n]), filled(drafter, ids[:, :n])
    for accepted in [0, 1, 2, 3, 4] * 4:
        block = ids[:, n : n + 5].clone()  # the newest token, which neither cache holds, and four drafts
        block[:, 1 + accepted :] = (block[:, 1 + accepted :] + 1) % 39
        logits(drafter, block[:, :4], cache=drafts)
        logits(model, block, cache=ours)
        n += 1 + accepted
        ours.crop(n)
        if accepted == 4:
            with pytest.raises(InputError, match="cannot be cropped"):
                drafts.crop(n)
            logits(drafter, block[:, 4:], cache=drafts)
        else:
            drafts.crop(n)
        assert ours.lengths == drafts.lengths == [n, n]
    assert_same_contents(model, ours, filled(model, ids[:, :n]), 1e-5)
    assert_same_contents(drafter, drafts, filled(drafter, ids[:, :n]), 1e-5)
