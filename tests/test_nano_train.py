"""Nano's training: its operations equal the reference, its batches say what inference would see, and it learns."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from helpers import relative_rms, unchecked
from torch.nn import functional as F

from inkling_ref import checkpoint
from inkling_ref.cache import Step
from inkling_ref.chat import END_SAMPLING, Tokenizer
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.errors import InputError
from inkling_ref.model import Inkling
from inkling_ref.nano import evaluate, rows, train
from inkling_ref.nano.muon import Muon, orthogonal
from inkling_ref.nano.tasks import TASKS
from inkling_ref.nano.training_ops import band, route, training_backend

SHIPPED = train.SHIPPED


def small(layer_types: list[str]) -> InklingConfig:
    """Nano with few layers."""
    config = InklingConfig.nano()
    text = replace(
        config.text, num_hidden_layers=len(layer_types), layer_types=layer_types, n_layers_per_attn_res_block=2
    )
    return replace(config, text=text)


def randomised(config: InklingConfig) -> Inkling:
    """A model in which every term matters."""
    torch.manual_seed(0)
    model = Inkling(config)
    train.initialise(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".attn_res." in name:
                p.normal_()
            elif name.endswith("gate.bias"):
                p.normal_(std=0.1)
    return model.requires_grad_(True)


@pytest.fixture(scope="module")
def encoder():
    return rows.Encoder(Tokenizer.from_pretrained(SHIPPED))


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- The operations


@pytest.mark.parametrize(("config", "T"), [(InklingConfig.tiny(), 40), (small([SLIDING, SLIDING, FULL]), 192)])
def test_training_backend_equals_the_reference(config, T):
    reference = randomised(config)
    fast = Inkling(config, training_backend()).requires_grad_(True)
    fast.load_state_dict(reference.state_dict())
    e = torch.randn(3, T, config.text.hidden_size)
    probe = torch.randn(3, T, config.text.hidden_size)
    results = []
    for model in (reference, fast):
        hidden = model.llm(e, Step.make([0] * 3, T, e.device))
        named = [(n, p) for n, p in model.llm.layers.named_parameters() if not n.endswith("gate.bias")]
        gradients = torch.autograd.grad((hidden * probe).sum(), [p for _, p in named])
        results.append((hidden, dict(zip([n for n, _ in named], gradients, strict=True))))
    (wanted, wanted_gradients), (hidden, gradients) = results
    assert relative_rms(hidden, wanted) < 1e-4
    for name, gradient in gradients.items():
        assert relative_rms(gradient, wanted_gradients[name]) < 1e-3, name


def test_one_hot_embedding_is_the_embedding():
    model = randomised(InklingConfig.tiny())
    ids = torch.randint(0, 40, (3, 17))
    assert torch.equal(train.embed(model.llm, ids), model.llm.embed_tokens(ids))


@pytest.mark.parametrize(("first", "x", "columns"), [(1, 5, 10), (0, 3, 7), (-4, 5, 5)])
def test_band_shifts_each_row_by_one(first, x, columns):
    t = 5
    values = torch.randn(2, t, x)
    shifted = band(values, first, columns)
    assert shifted.shape == (2, t, columns)
    for i in range(t):
        for j in range(x):
            if 0 <= first + i + j < columns:
                assert torch.equal(shifted[:, i, first + i + j], values[:, i, j])


def test_gradient_of_the_correction_bias_is_the_load():
    torch.manual_seed(0)
    bias = torch.zeros(7, requires_grad=True)
    weights, ids = route(torch.randn(31, 12), torch.randn(7, 12), bias, 3, 2.0)
    (load,) = torch.autograd.grad(weights.square().sum(), bias)
    assert torch.allclose(load, torch.bincount(ids.flatten(), minlength=7) / ids.numel())


@pytest.fixture
def compiler():
    """Leaves torch.compile as it was: no limit changed, no compiled variants of functions that other tests compile."""
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def test_compiles_in_whole_pieces(encoder, one_thread, compiler):
    """No graph breaks and few variants, which the CUDA graphs rely on."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    shapes = {"short": train.Shape.short(16, 128)}
    plan = train.Preset(small([SLIDING, FULL, SLIDING]), shapes, {"short": 0}, 1)
    torch.manual_seed(0)
    plain, fast = (
        train.Trainer(plan, torch.device("cpu"), compile_options=options)
        for options in (None, {"backend": counter, "fullgraph": True, "dynamic": False})
    )
    fast.model.load_state_dict(plain.model.state_dict())
    fast.picture_head.load_state_dict(plain.picture_head.state_dict())
    batch = train.to_tensors(rows.short_batch(0, encoder, 16), shapes["short"], encoder.image_id)
    for trainer in (plain, fast):
        trainer.kinds["short"].load(batch)
        with unchecked():
            trainer.kinds["short"].run()
    assert torch.allclose(fast.kinds["short"].parts, plain.kinds["short"].parts, rtol=1e-4)
    for (name, _), a, b in zip(plain.model.named_parameters(), fast.gradients, plain.gradients, strict=False):
        assert relative_rms(a, b) < 1e-2, name
    # Attention sliding and full, two convolutions' shapes in one, mixtures of 1 to 3 sources, MoE, encoder, loss.
    assert counter.frame_count <= 14


# --- Batches and the rounded copy


@pytest.mark.parametrize(("kind", "count", "length"), [("short", 16, 128), ("long", 8, 512)])
def test_training_sees_what_inference_sees(encoder, one_thread, kind, count, length):
    """The losses of a training batch are those of `Inkling.forward` on the same ids and pictures."""
    make, shape = (
        (rows.short_batch, train.Shape.short(count, length))
        if kind == "short"
        else (rows.long_batch, train.Shape.long(count, length))
    )
    plan = train.Preset(small([SLIDING, FULL]), {kind: shape}, {kind: 0}, 1)
    trainer = train.Trainer(plan, torch.device("cpu"))
    batch = make(4, encoder, count, length)
    trainer.kinds[kind].load(train.to_tensors(make(5, encoder, count, length), shape, encoder.image_id))  # left-overs
    trainer.kinds[kind].load(train.to_tensors(batch, shape, encoder.image_id))
    trainer.kinds[kind].run()

    model = Inkling(plan.config)
    model.load_state_dict(trainer.model.state_dict())
    ids, targets = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.targets)[:, 1:].flatten()
    grids = F.pad(torch.from_numpy(batch.grids).long(), (1, 0), value=1)
    with torch.no_grad():
        logits = model(ids, torch.from_numpy(batch.pixel_values()), grids).logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    wanted = torch.stack([each[targets == worth].mean() for worth in (rows.ANSWER, rows.TEXT)])
    assert torch.allclose(trainer.kinds[kind].parts[:2], wanted, rtol=1e-4)


def test_working_copy_is_what_the_file_holds(tmp_path):
    plan = train.Preset(small([SLIDING, SLIDING, FULL]), {}, {}, 1)
    trainer = train.Trainer(plan, torch.device("cpu"))
    checkpoint.save(trainer.master, tmp_path, experts="nvfp4+mxfp8")
    stored = checkpoint.load(tmp_path, experts="dequantize").state_dict()
    for name, value in trainer.model.state_dict().items():
        if ".experts." in name:
            assert torch.equal(stored[name], value), name
            assert not torch.equal(value, trainer.master.state_dict()[name]), name
        else:
            assert torch.allclose(stored[name], value, rtol=2**-8), name


# --- The optimisers


def test_orthogonal_brings_singular_values_to_about_one():
    torch.manual_seed(0)
    for shape in ((3, 24, 10), (2, 10, 24), (1, 16, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert (values < 1.3).all()
        assert (values > 0.3).all()


def test_muon_descends_and_keeps_parameters_as_views():
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(2, 5, 3))]
    muon = Muon(parameters)
    assert len(muon.stacks) == 1
    before = [p.square().sum().item() for p in parameters]
    for _ in range(5):
        for p in parameters:
            p.grad.copy_(2 * p.detach())
        muon.step(torch.tensor(0.1))
    assert all(p.square().sum().item() < b for p, b in zip(parameters, before, strict=True))


def test_bias_moves_towards_even_loads():
    trainer = train.Trainer(train.Preset(small([SLIDING, FULL]), {}, {}, 1), torch.device("cpu"))
    trainer.set_rates(0.0, 0.0)
    bias = trainer.biases[0]
    before = trainer.master.llm.embed.weight.clone()
    for _ in range(8):
        bias.grad[3] = 1.0  # everything went to expert 3
        trainer.update()
    assert bias.argmin() == 3
    assert bias.sum().abs() < 1e-5
    assert torch.equal(trainer.master.llm.embed.weight, before)  # at rate 0 nothing else moves


# --- A whole run


def test_two_layers_learn_in_seconds_on_a_cpu(tmp_path, monkeypatch):
    """By a clock that a busy machine does not slow down: every look at it is a second later."""
    monkeypatch.setattr(train, "monotonic", itertools.count().__next__)
    plan = train.Preset(small([SLIDING, FULL]), {"short": train.Shape.short(8, 128)}, {"short": 1}, warmup=5)
    monkeypatch.setattr(train, "preset", lambda name: plan)
    lines = []
    with unchecked():
        history = train.main(tmp_path / "out", minutes=24 / 60, device="cpu", seed=3, log=lines.append)
        went_on = train.main(tmp_path / "on", 3 / 60, "cpu", seed=4, resume=tmp_path / "out-bf16", log=lines.append)
    assert history[0]["short"][0] > 6.5
    assert history[-1]["short"][0] < 0.5 * history[0]["short"][0]  # answers
    assert history[-1]["short"][1] < 0.8 * history[0]["short"][1]  # text
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["history"] == history
    tokenizer = Tokenizer.from_pretrained(tmp_path / "out")
    for folder in ("out", "out-bf16"):
        model = checkpoint.load(tmp_path / folder)
        assert model.config.text.eos_token_id == tokenizer.marker_id(END_SAMPLING)
        assert model.config.image_token_id == tokenizer.image_token_id
    assert went_on[0]["short"][0] < 0.7 * history[0]["short"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"minutes": 0.0}, "minutes: 0"), ({"preset_name": "big"}, "preset 'big'"), ({"device": "cuda"}, "device 'cuda'")],
)
def test_wrong_options_are_named(tmp_path, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InputError, match=message):
        train.main(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# --- The evaluation, on the shipped checkpoint


@pytest.fixture(scope="module")
def nano():
    return checkpoint.load(SHIPPED, experts="dequantize"), Tokenizer.from_pretrained(SHIPPED)


def test_teacher_forcing_says_what_greedy_decoding_says(nano, encoder, one_thread):
    model, tokenizer = nano
    torch.manual_seed(0)
    clumsy = Inkling(model.config)  # a copy that errs now and then
    clumsy.load_state_dict({n: v + 0.1 * v.std() * torch.randn_like(v) for n, v in model.state_dict().items()})
    examples = [e for name in ("colour", "two_pictures", "story", "sum_thinking") for e in TASKS[name].examples(6, 1)]
    forced = evaluate.teacher_forced(clumsy, encoder, examples)
    assert 0 < sum(forced) < len(examples)
    with unchecked():
        assert evaluate.decoded(clumsy, tokenizer, examples) == forced


def test_evaluation_prints_a_table(capsys, one_thread):
    results = evaluate.main(SHIPPED, ["talk", "sum_direct"], examples=4)
    assert set(results) == {"shipped"}
    assert results["shipped"]["talk"][1] == 4
    assert "sum_direct" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["jokes"]}, "task 'jokes'"),
        ({"examples": 0}, "examples: 0"),
        ({"precision": "int1"}, "precision 'int1'"),
        ({"precision": "both"}, "-bf16: not found"),
    ],
)
def test_wrong_evaluation_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        evaluate.main(SHIPPED, **options)
