"""The whole model: every way to feed a prompt gives the same logits; padding, packing, images, dtypes, errors."""

import copy

import pytest
import torch
from helpers import IMAGE, NoNarrowFloat, Spy, hide_triton, logits, random_ids, random_model, relative_rms, unchecked

from inkling_ref import residual
from inkling_ref.backends import Backend
from inkling_ref.config import SLIDING, InklingConfig, TextConfig
from inkling_ref.errors import InputError
from inkling_ref.model import Inkling, keeps_float32

T = 40
W = InklingConfig.tiny().text.sliding_window_size  # 8; the bias extent of full layers is 12


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, T)


@pytest.fixture(scope="module")
def full(model, ids):
    return logits(model, ids)


def in_pieces(model, ids, ends, cache=None):
    """Logits of the whole prompt, fed in pieces that end at `ends`."""
    cache = cache or model.new_cache(len(ids))
    pieces = [logits(model, ids[:, a:b], cache=cache) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
    assert cache.lengths == [ends[-1]] * len(ids)
    return torch.cat(pieces, dim=1)


# --- Prefill and decode --------------------------------------------------------------------------------------------


def test_every_split_into_prefill_and_decode(model, ids, full):
    with unchecked():
        errors = {n: relative_rms(in_pieces(model, ids, (n, *range(n + 1, T + 1))), full) for n in range(1, T + 1)}
    assert max(errors.values()) < 1e-5, errors


def test_every_chunk_size(model, ids, full):
    with unchecked():
        errors = {n: relative_rms(in_pieces(model, ids, (*range(n, T, n), T)), full) for n in range(1, T + 1)}
    assert max(errors.values()) < 1e-5, errors


def test_mixed_calls(model, ids, full):
    """Decode, chunk, decode, a long chunk, decode: pieces longer and shorter than window, taps and reserve."""
    assert relative_rms(in_pieces(model, ids, (2, 3, 9, 10, 11, 14, 39, 40)), full) < 1e-5
    cache = model.new_cache(2, rollback=0)
    assert relative_rms(in_pieces(model, ids, (1, 2, 12, 13, 30, 31, 40), cache), full) < 1e-5


def test_float64_is_the_truth(ids, full):
    """float32 stays within 1e-5 of it; in float64 all ways of feeding agree to 1e-12."""
    model = random_model(dtype=torch.float64)
    truth = logits(model, ids)
    assert truth.dtype == torch.float64
    assert relative_rms(full, truth) < 1e-5
    for ends in [(T,), (17, *range(18, T + 1)), (7, 14, 21, 28, 35, 40)]:
        assert relative_rms(in_pieces(model, ids, ends), truth) < 1e-12


def test_no_step_leaves_float64():
    model = random_model(dtype=torch.float64)
    cache = model.new_cache(2)
    ids = random_ids(2, 11)
    ids[0, 3:7] = IMAGE
    pixels = torch.rand(4, 8, 8, 3, dtype=torch.float64)
    with torch.no_grad(), NoNarrowFloat():
        model(ids, pixels, torch.tensor([[1, 2, 2]]), cache=cache)
        model(random_ids(2, 1), cache=cache)


def test_logits_to_keep(model, ids, full):
    for n in (1, 3, T):
        out = logits(model, ids, logits_to_keep=n)
        assert relative_rms(out, full[:, -n:]) < 1e-5
    with torch.inference_mode():
        out = model(ids, logits_to_keep=1)
    assert out.hidden.shape == (2, T, 32)
    assert relative_rms(model.llm.logits(out.hidden), full) < 1e-6


def test_no_token_sees_a_later_one(model, ids, full):
    for t in (1, 5, W, 23, T - 1):
        other = ids.clone()
        other[:, t] = (other[:, t] + 1) % IMAGE
        changed = logits(model, other)
        assert relative_rms(changed[:, :t], full[:, :t]) < 1e-5
        assert relative_rms(changed[:, t], full[:, t]) > 1e-2


def test_only_used_vocabulary_rows_have_logits(model, ids):
    text = model.config.text
    assert logits(model, ids).shape[-1] == text.unpadded_vocab_size < text.vocab_size


# --- Rows of different length --------------------------------------------------------------------------------------


def padded(rows, side, width):
    """(ids, mask): each row with its padding on one side, on both, or between its tokens."""
    ids, mask = random_ids(len(rows), width, seed=5), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        n = len(tokens)
        free = width - n
        start = {"left": free, "right": 0, "both": free // 2}.get(side)
        if side == "inside":
            places = torch.cat([torch.arange(n // 2), torch.arange(n // 2 + free, width)])
        else:
            places = torch.arange(start, start + n)
        ids[row, places] = tokens
        mask[row, places] = True
    return ids, mask


ROWS = [random_ids(n, seed=n) for n in (1, 6, 13, 27)]


@pytest.mark.parametrize("side", ["left", "right", "both", "inside"])
@pytest.mark.parametrize("width", [27, 31])
def test_a_padded_row_gives_what_it_gives_alone(model, side, width):
    ids, mask = padded(ROWS, side, width)
    with torch.inference_mode():
        out = model(ids, attention_mask=mask)
    for row, tokens in enumerate(ROWS):
        assert relative_rms(out.logits[row][mask[row]], logits(model, tokens[None])[0]) < 1e-5
    assert not out.hidden[~mask].any()


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_with_a_cache(model, side):
    """Prefill, a chunk in which every row has its own number of tokens (one has none), decode; crop per row; again."""
    extra = [random_ids(n, seed=40 + n) for n in (5, 0, 9, 2)]
    last = random_ids(4, 3, seed=77)
    cache = model.new_cache(4)
    for rows in (ROWS, extra):
        ids, mask = padded(rows, side, max(map(len, rows)) + 1)
        logits(model, ids, attention_mask=mask, cache=cache)
    lengths = [len(a) + len(b) for a, b in zip(ROWS, extra, strict=True)]
    assert cache.lengths == lengths
    for keep in (lengths, [3, 2, 11, 20]):
        branch = cache.fork()
        branch.crop(keep)
        steps = torch.cat([logits(model, last[:, t : t + 1], cache=branch) for t in range(3)], dim=1)
        block = logits(model, last, cache=(again := cache.fork(), again.crop(keep))[0])
        for row in range(4):
            tokens = torch.cat([ROWS[row], extra[row]])[: keep[row]]
            alone = logits(model, torch.cat([tokens, last[row]])[None])[0, -3:]
            assert relative_rms(steps[row], alone) < 1e-5
            assert relative_rms(block[row], alone) < 1e-5


def test_decoding_while_some_rows_have_finished(model):
    """Rows that are masked out of a step stay where they are."""
    cache = model.new_cache(3)
    rows = [[] for _ in range(3)]
    for step in range(14):
        ids = random_ids(3, 1, seed=step)
        mask = torch.tensor([[True], [step % 3 == 0], [step < 5]])
        out = logits(model, ids, attention_mask=mask, cache=cache)
        for row in range(3):
            if mask[row]:
                rows[row].append(int(ids[row]))
                alone = logits(model, torch.tensor([rows[row]]))[0, -1]
                assert relative_rms(out[row, 0], alone) < 1e-5
    assert cache.lengths == [14, 5, 5]


def test_masks_of_integers_and_of_all_true(model, ids, full):
    assert relative_rms(logits(model, ids, attention_mask=torch.ones_like(ids)), full) < 1e-6
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    out = logits(model, ids, attention_mask=mask)
    assert relative_rms(out[1, :30], full[1, :30]) < 1e-5
    assert relative_rms(out[0], full[0]) < 1e-5


# --- Packed documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [[3, 5], [4, 1, 6], [1, 1, 1], [20, 13, 7], [11]], ids=str)
def test_case_06_packed_documents(model, documents):
    """Every document gives the logits it gives alone; an id that returns after another document is a new document."""
    length = sum(documents)
    ids = random_ids(2, length, seed=length)
    document_ids = torch.cat([torch.full((n,), i % 2) for i, n in enumerate(documents)]).expand(2, -1)
    packed = logits(model, ids, document_ids=document_ids)
    start = 0
    for n in documents:
        alone = logits(model, ids[:, start : start + n])
        assert relative_rms(packed[:, start : start + n], alone) < 1e-5
        start += n


def test_packed_rows_with_different_boundaries(model):
    ids = random_ids(2, 9, seed=3)
    document_ids = torch.tensor([[7] * 2 + [8] * 7, [1] * 6 + [0] * 3])
    packed = logits(model, ids, document_ids=document_ids)
    for row, cut in ((0, 2), (1, 6)):
        for part in (slice(0, cut), slice(cut, 9)):
            assert relative_rms(packed[row, part], logits(model, ids[row : row + 1, part])[0]) < 1e-5


def test_log_scaling_restarts_in_each_document():
    """tau counts positions within the document: a long document before it changes nothing."""
    config = InklingConfig.tiny()
    config.text.log_scaling_n_floor, config.text.log_scaling_alpha = 2, 1.5
    model = random_model(config)
    ids = random_ids(1, 36, seed=6)
    document_ids = torch.tensor([[0] * 21 + [1] * 15])
    packed = logits(model, ids, document_ids=document_ids)
    assert relative_rms(packed[:, 21:], logits(model, ids[:, 21:])) < 1e-5


# --- Images --------------------------------------------------------------------------------------------------------


def pictures():
    """Two pictures of 2 x 1 and 1 x 3 tiles: (pixel_values, image_grid_thw)."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(5, 8, 8, 3, generator=generator) * 2 - 1, torch.tensor([[1, 2, 1], [1, 1, 3]])


def test_image_features_fill_the_image_tokens_in_order(model):
    pixels, grid = pictures()
    ids = random_ids(2, 9, seed=8)
    ids[0, 2:4], ids[1, 4:7] = IMAGE, IMAGE
    features = model.image_features(pixels, grid)
    e = model.llm.embed_tokens(ids)
    e[0, 2:4], e[1, 4:7] = features[:2], features[2:]  # after the embedding norm

    seen = []
    hook = model.llm.layers[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].partial))
    out = logits(model, ids, pixel_values=pixels, image_grid_thw=grid)
    hook.remove()
    assert torch.equal(seen[0], e)
    assert relative_rms(logits(model, ids, image_features=features), out) < 1e-6

    # rows alone, and the first row's picture does not reach the second row
    alone = logits(model, ids[1:], pixel_values=pixels[2:], image_grid_thw=grid[1:])
    assert relative_rms(out[1:], alone) < 1e-5


def test_images_in_padded_rows(model):
    """Image tokens of padding are no image tokens; features go to rows in order."""
    pixels, grid = pictures()
    a, b = random_ids(4, seed=1), random_ids(9, seed=2)
    a[1:3], b[5:8] = IMAGE, IMAGE
    ids, mask = padded([a, b], "left", 10)
    ids[~mask] = IMAGE
    out = logits(model, ids, attention_mask=mask, pixel_values=pixels, image_grid_thw=grid)
    assert relative_rms(out[0, 6:], logits(model, a[None], pixel_values=pixels[:2], image_grid_thw=grid[:1])[0]) < 1e-5
    assert relative_rms(out[1, 1:], logits(model, b[None], pixel_values=pixels[2:], image_grid_thw=grid[1:])[0]) < 1e-5


def test_images_in_the_first_chunk_and_in_a_later_one(model):
    pixels, grid = pictures()
    ids = random_ids(1, 14, seed=4)
    ids[0, 1:3], ids[0, 8:11] = IMAGE, IMAGE
    full = logits(model, ids, pixel_values=pixels, image_grid_thw=grid)
    cache = model.new_cache()
    first = logits(model, ids[:, :6], pixel_values=pixels[:2], image_grid_thw=grid[:1], cache=cache)
    second = logits(model, ids[:, 6:], pixel_values=pixels[2:], image_grid_thw=grid[1:], cache=cache)
    assert relative_rms(torch.cat([first, second], dim=1), full) < 1e-5


# --- Errors --------------------------------------------------------------------------------------------------------


def test_wrong_inputs_are_refused_by_name(model):
    ids = random_ids(2, 6)
    pixels, grid = pictures()
    with_image = ids.clone()
    with_image[0, 2:4] = IMAGE
    refused = [
        ("input_ids", {"input_ids": ids[0]}),
        ("input_ids", {"input_ids": ids.float()}),
        ("input_ids", {"input_ids": ids[:, :0]}),
        ("token id 44", {"input_ids": torch.tensor([[3, 44]])}),
        ("token id -1", {"input_ids": torch.tensor([[3, -1]])}),
        ("token id 40", {"input_ids": torch.tensor([[40]])}),
        ("attention_mask", {"input_ids": ids, "attention_mask": torch.ones(2, 5, dtype=torch.bool)}),
        # additive masks, 0 for a token and -inf for padding, would mean the opposite
        ("attention_mask: torch.float32", {"input_ids": ids, "attention_mask": torch.zeros(2, 6)}),
        ("document_ids", {"input_ids": ids, "document_ids": torch.zeros(1, 6, dtype=torch.int64)}),
        ("cache", {"input_ids": ids, "cache": model.new_cache(3)}),
        ("document_ids", {"input_ids": ids, "cache": model.new_cache(2), "document_ids": torch.zeros_like(ids)}),
        ("2 image tokens", {"input_ids": with_image}),
        ("0 image tokens", {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}),
        ("5 tiles", {"input_ids": with_image, "pixel_values": pixels, "image_grid_thw": grid}),
        ("image_grid_thw: None", {"input_ids": with_image, "pixel_values": pixels}),
    ]
    for words, arguments in refused:
        with unchecked(), pytest.raises(InputError, match=words):
            logits(model, arguments.pop("input_ids"), **arguments)


def test_features_of_another_width_do_not_pass(model):
    """Their first numbers would fill the places, and nobody would know."""
    ids = random_ids(1, 6)
    ids[0, 2:4] = IMAGE
    D = model.config.text.hidden_size
    assert logits(model, ids, image_features=torch.ones(2, D)).isfinite().all()
    with unchecked(), pytest.raises(InputError, match=r"image_features: \(2, 33\), expected \(2, 32\)"):
        logits(model, ids, image_features=torch.ones(2, D + 1))


def test_a_refused_call_leaves_the_cache_as_it_was(model, ids, full):
    cache = model.new_cache(2)
    logits(model, ids[:, :9], cache=cache)
    with pytest.raises(InputError):
        logits(model, torch.full((2, 3), 47), cache=cache)
    assert relative_rms(logits(model, ids[:, 9:], cache=cache), full[:, 9:]) < 1e-5


def test_a_text_model_refuses_pictures():
    config = InklingConfig.tiny()
    config.vision = None
    model = random_model(config)
    pixels, grid = pictures()
    with pytest.raises(InputError, match="no image encoder"):
        logits(model, random_ids(1, 5), pixel_values=pixels, image_grid_thw=grid)
    assert logits(model, torch.tensor([[IMAGE, 1]])).isfinite().all()  # for it, that id is a token like any other
    with pytest.raises(InputError, match="0 image tokens, the images have 2 tiles"):  # not dropped in silence
        logits(model, torch.tensor([[2, 1]]), image_features=torch.ones(2, config.text.hidden_size))


# --- Backends, dtypes, gradients -----------------------------------------------------------------------------------


def test_kernel_report_names_every_operation():
    model = Inkling(InklingConfig.tiny())
    report = model.kernel_report()
    assert report == {
        "mix_and_norm": "inkling_ref.residual.mix_and_norm",
        "short_conv": "inkling_ref.short_conv.short_conv",
        "dynamic_short_conv": "inkling_ref.short_conv.dynamic_short_conv",
        "attend": "inkling_ref.attention.attend",
        "route": "inkling_ref.moe.route",
        "experts": "inkling_ref.moe.experts",
        "fake_nvfp4": "inkling_ref.quantization.fake_nvfp4",
        "fake_mxfp8": "inkling_ref.quantization.fake_mxfp8",
        "quantize_stored": "inkling_ref.quantization.quantize_stored",
    }


def test_unknown_and_missing_backends_are_refused(monkeypatch):
    hide_triton(monkeypatch)
    message = r"^backend 'triton': Triton is not installed, expected `pip install triton`$"
    with pytest.raises(InputError, match=message):
        Inkling(InklingConfig.tiny(), backend="triton")
    with pytest.raises(InputError, match=r"^backend 'cudnn': expected 'torch' or 'triton'$"):
        Inkling(InklingConfig.tiny(), backend="cudnn")


def test_every_operation_goes_through_the_backend(ids):
    spy = Spy()
    model = random_model(backend=spy.backend)
    logits(model, ids)
    counts = {name: len(spy.of(name)) for name in ("mix_and_norm", "attend", "route", "experts")}
    layers = 4  # three sliding, one full
    assert counts == {"mix_and_norm": 2 * layers + 1, "attend": layers, "route": layers, "experts": layers}
    # Channels, as one call may serve several convolutions: k and v, the attention's output and the MLP's.
    channels = {n: sum(call["u"].shape[-1] for call in spy.of(n)) for n in ("short_conv", "dynamic_short_conv")}
    assert channels == {"short_conv": 3 * 2 * 3 * 10 + 4 * 2 * 32, "dynamic_short_conv": 2 * 2 * 14}


def test_quantised_activations_follow_each_layers_format(ids, full):
    """Off by default; on, each layer by the format its experts were stored in; off again, bit for bit as before."""
    model = random_model()
    before = logits(model, ids)
    assert torch.equal(logits(model.quantize_activations(), ids), before)  # dense layers stay as they are
    results = []
    for formats in (["nvfp4", "bf16", "bf16", "bf16"], ["bf16", "bf16", "bf16", "nvfp4"], ["nvfp4"] * 4):
        for layer, stored in zip(model.llm.layers, formats, strict=True):
            layer.mlp.experts.stored_format = stored
        results.append(logits(model.quantize_activations(), ids))
        assert relative_rms(results[-1], before) > 1e-2
    assert relative_rms(results[0], results[1]) > 1e-2
    assert torch.equal(logits(model.quantize_activations(False), ids), before)


def test_cast_keeps_float32_tensors(model):
    kept = {name for name, _ in model.named_parameters() if keeps_float32(name)}
    low = copy.deepcopy(model).cast(torch.bfloat16)
    assert {name for name, p in low.named_parameters() if p.dtype == torch.float32} == kept
    assert {p.dtype for name, p in low.named_parameters() if name not in kept} == {torch.bfloat16}
    assert (low.dtype, low.llm.embed.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert logits(low, random_ids(1, 5)).dtype == torch.float32
    for name in (
        "llm.layers.0.attn.k_sconv.weight", "llm.layers.0.attn.v_sconv.weight", "llm.layers.3.attn_sconv.weight",
        "llm.layers.3.mlp_sconv.weight", "llm.layers.1.mlp.gate.weight", "llm.layers.1.mlp.gate.bias",
        "llm.attn_res.attn_queries.2", "llm.attn_res.mlp_queries.0", "llm.attn_res.output_query",
    ):  # fmt: skip
        assert name in kept
    for name in ("llm.layers.3.attn.k_sconv.static_w", "llm.layers.3.attn.k_sconv.weight_proj", "llm.norm.weight"):
        assert name in low.state_dict()
        assert name not in kept


def test_float64_and_back_loses_nothing(model):
    again = copy.deepcopy(model).cast(torch.float64).cast(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_bfloat16_decoding_equals_prefill_up_to_rounding(ids):
    """Not bit for bit (matrix products of other shapes), but far below the distance to float32."""
    model, wide_model = random_model(dtype=torch.bfloat16), random_model()
    wide_model.load_state_dict(model.state_dict())
    truth = logits(wide_model, ids)
    prefill = logits(model, ids)
    decoded = in_pieces(model, ids, (9, *range(10, T + 1)))
    # The median token: where rounding flips an expert, a token's error is as large as its logits.
    prefill_error, decoded_error = (
        (x - truth).norm(dim=-1).div(truth.norm(dim=-1)).median() for x in (prefill, decoded)
    )
    assert 1e-3 < prefill_error < 0.05
    assert decoded_error < 1.5 * prefill_error


def test_every_parameter_is_trained():
    """Gradients reach all parameters, images included, but not the correction bias and the padded vocabulary rows."""
    model = random_model(dtype=torch.float64).requires_grad_(True)
    pixels, grid = pictures()
    ids = random_ids(3, T, seed=11)
    ids[0, 2:4], ids[1, 4:7] = IMAGE, IMAGE
    out = model(ids, pixels.double(), grid).logits
    (out * torch.randn_like(out)).mean().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-9}
    assert idle == {f"llm.layers.{i}.mlp.gate.bias" for i in range(4)}
    used = model.config.text.unpadded_vocab_size
    assert not model.llm.unembed.weight.grad[used:].any()
    assert not Inkling(InklingConfig.tiny()).llm.layers[0].mlp.gate.bias.requires_grad


def test_the_gradient_is_the_slope():
    """Directional derivative by central differences, in float64, all parameters at once."""
    model = random_model(dtype=torch.float64).requires_grad_(True)
    ids = random_ids(1, 13, seed=2)
    parameters = list(model.llm.parameters())
    loss = model(ids).logits.square().mean()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    directions = [
        torch.randn(p.shape, generator=generator, dtype=p.dtype) * (g is not None)
        for p, g in zip(parameters, gradients, strict=True)
    ]
    slope = sum((d * g).sum() for d, g in zip(directions, gradients, strict=True) if g is not None)
    values, eps = [], 1e-6
    for sign in (1, -2):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p += sign * eps * d
            values.append(model(ids).logits.square().mean())
    assert abs((values[0] - values[1]) / (2 * eps) / slope - 1) < 1e-5


# --- cases.md ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_case_08_prompts_shorter_than_the_taps(model, ids, full, length):
    """Prefill against token by token; a later token changes nothing before it."""
    prompt = ids[:, :length]
    assert relative_rms(logits(model, prompt), full[:, :length]) < 1e-5
    assert relative_rms(in_pieces(model, prompt, range(1, length + 1)), full[:, :length]) < 1e-5


@pytest.mark.parametrize("length", [W - 1, W, W + 1, 2 * W])
def test_case_09_lengths_around_the_window(model, ids, full, length):
    prompt = ids[:, :length]
    assert relative_rms(logits(model, prompt), full[:, :length]) < 1e-5
    assert relative_rms(in_pieces(model, prompt, range(1, length + 1)), full[:, :length]) < 1e-5


def test_case_13_a_call_leaves_nothing_on_the_module(ids):
    """A second call equals a call on a fresh object; also when the window is larger than the longest text."""
    for window in (W, 1000):
        config = InklingConfig.tiny()
        config.text.sliding_window_size = window
        model, fresh = random_model(config), random_model(config)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        in_pieces(model, random_ids(3, 17, seed=9), (11, 12, 17))
        logits(model, random_ids(1, 5, seed=8), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
        assert torch.equal(logits(model, ids), logits(fresh, ids))
        assert torch.equal(in_pieces(model, ids, (30, 31, 40)), in_pieces(fresh, ids, (30, 31, 40)))
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("size", range(1, 22))
def test_case_15_every_chunk_size_of_21_tokens_then_decode(model, ids, full, size):
    ends = (*range(size, 21, size), 21, 22, 23, 24)
    assert relative_rms(in_pieces(model, ids[:, :24], ends), full[:, :24]) < 1e-5


def test_case_18_left_padding_and_a_row_without_a_token(model):
    """Lengths 1 and 6; then a third row that is all padding, in prefill and in decode: zeros, never NaN."""
    rows = [random_ids(1, seed=1), random_ids(6, seed=2), random_ids(0)]
    ids, mask = padded(rows, "left", 6)
    for count in (2, 3):
        cache = model.new_cache(count)
        with torch.inference_mode():
            out = model(ids[:count], attention_mask=mask[:count], cache=cache)
        for row in range(2):
            assert relative_rms(out.logits[row, 6 - len(rows[row]) :], logits(model, rows[row][None])[0]) < 1e-5
        assert out.logits.isfinite().all()
        assert not out.hidden[~mask[:count]].any()
    step = random_ids(3, 1, seed=3)
    with torch.inference_mode():
        out = model(step, attention_mask=torch.tensor([[True], [True], [False]]), cache=cache)
    assert cache.lengths == [2, 7, 0]
    assert not out.hidden[2].any()
    for row in range(2):
        assert relative_rms(out.logits[row, 0], logits(model, torch.cat([rows[row], step[row]])[None])[0, -1]) < 1e-5
    with torch.inference_mode():
        out = model(step, cache=cache)  # the empty row starts now, at position 0
    assert relative_rms(out.logits[2], logits(model, step[2:])[0]) < 1e-5


# Completed blocks that each sublayer reads beside the running sum, by hand from: a boundary (index divisible by the
# block length) closes the running sum between its attention and its MLP; layer 0's attention reads without mixing.
SOURCES = {
    (6, 2): {"attention": [0, 1, 1, 2, 2, 3], "mlp": [1, 1, 2, 2, 3, 3], "output": 3},
    (5, 3): {"attention": [0, 1, 1, 1, 2], "mlp": [1, 1, 1, 2, 2], "output": 2},
}


@pytest.mark.parametrize(("layers", "block"), SOURCES)
def test_case_20_completed_blocks_read_by_each_sublayer(layers, block):
    config = InklingConfig.tiny()
    config.text = TextConfig(
        vocab_size=48, unpadded_vocab_size=40, hidden_size=12, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=3, swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=3,
        sliding_window_size=5, d_rel=2, rel_extent=5, n_layers_per_attn_res_block=block, moe_intermediate_size=7,
        n_routed_experts=3, num_experts_per_tok=1, eos_token_id=None, layer_types=[SLIDING] * layers,
    )  # fmt: skip
    spy = Spy()
    model = random_model(config, backend=spy.backend)
    logits(model, random_ids(1, 4))
    calls = spy.of("mix_and_norm")
    blocks = [call["sources"].shape[2] - 1 for call in calls]
    expected = SOURCES[layers, block]
    assert blocks[0:-1:2] == expected["attention"]
    assert blocks[1:-1:2] == expected["mlp"]
    assert blocks[-1] == expected["output"]
    assert [call["queries"] is None for call in calls] == [True] + [False] * (2 * layers)

    # The output mixture comes before the final norm, whose result enters the unembedding.
    last = calls[-1]
    mixture = residual.mix(last["sources"], model.llm.attn_res.output_query[None], 1e-6)[:, :, 0]
    with torch.inference_mode():
        hidden = model(random_ids(1, 4)).hidden
    assert relative_rms(hidden, residual.rms_norm(mixture, model.llm.norm.weight, 1e-6)) < 1e-5
    assert not torch.equal(model.llm.norm.weight, torch.ones(12))


def swapped_rows(function):
    """A broken kernel: two rows (along the longest axis after the batch) of each result are exchanged."""

    def swap(t):
        axis = 0 if t.dim() == 2 else 1
        order = torch.arange(t.shape[axis])
        order[1], order[2] = 2, 1
        return t.index_select(axis, order)

    def broken(*args, **kwargs):
        out = function(*args, **kwargs)
        return type(out)(map(swap, out)) if isinstance(out, (list, tuple)) else swap(out)

    return broken


# What `forward` calls, unless activations are quantised.
@pytest.mark.parametrize("operation", [name for name, place in Backend().report().items() if "quantiz" not in place])
def test_case_23_a_broken_operation_is_noticed(ids, full, operation):
    """The measure that all tests here use sees two exchanged rows of one operation: 1000 times its bound of 1e-5."""
    broken = Backend(**{operation: swapped_rows(getattr(Backend(), operation))})
    assert relative_rms(logits(random_model(backend=broken), ids), full) > 1e-2


def test_case_23_fixtures_have_gaps(full):
    """Top-1 and top-2 logits of the fixture are apart by more than any error that passes, so greedy text is stable."""
    top = full.topk(2, dim=-1).values
    gap = top[..., 0] - top[..., 1]
    assert gap.median() > 0.3
    assert gap.min() > 100 * 1e-5 * full.square().mean().sqrt()


def test_names_are_the_released_ones():
    names = set(Inkling(InklingConfig.tiny()).state_dict())
    sliding = {"attn_norm.weight", "attn.k_sconv.weight", "attn.v_sconv.weight"}
    full = {f"{x}_input_norm.weight" for x in "qkv"}
    full |= {f"attn.{x}_sconv.{leaf}" for x in "kv" for leaf in ("static_w", "weight_proj")}
    common = {
        "mlp_norm.weight", "attn_sconv.weight", "mlp_sconv.weight", "mlp.gate.weight", "mlp.gate.bias",
        "mlp.experts.w13_weight", "mlp.experts.w2_weight", "attn.q_l2_clip.scale", "attn.rel_l2_clip.scale",
        "attn.rel_logits_proj.proj", *(f"attn.{x}.weight" for x in (
            "wq_du", "wk_dv", "wv_dv", "wr_du", "wo_ud", "gate_attn", "attn_sink_proj")),
    }  # fmt: skip
    for i, own in enumerate([sliding, sliding, sliding, full]):
        prefix = f"llm.layers.{i}."
        assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == common | own
    rest = {name for name in names if name.startswith("llm.") and ".layers." not in name}
    assert rest == {
        "llm.embed.weight", "llm.embed_norm.weight", "llm.unembed.weight", "llm.norm.weight",
        "llm.attn_res.output_query", *(f"llm.attn_res.attn_queries.{i}" for i in range(3)),
        *(f"llm.attn_res.mlp_queries.{i}" for i in range(4)),
    }  # fmt: skip


def test_no_matrix_of_tiny_is_square():
    """Equal sizes would hide exchanged axes."""
    shapes = {name: p.shape[-2:] for name, p in Inkling(InklingConfig.tiny()).llm.named_parameters() if p.ndim > 1}
    assert [name for name, (rows, columns) in shapes.items() if rows == columns] == []


def test_every_module_is_a_plain_module():
    """No hook, no buffer, no state beyond the parameters: what `load` fills is all there is."""
    model = Inkling(InklingConfig.tiny())
    assert not list(model.buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
