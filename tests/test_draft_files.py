"""Drafters on disk: what the header tells, what the config tells, what is refused and how it is named."""

import json

import pytest
import torch
from helpers import random_model
from safetensors.torch import load_file, save_file
from test_dspark import OPTIONS, PROMPTS, make

from inkling_ref import InklingConfig, InputError, generate, load, load_drafter, save, save_drafter
from inkling_ref.draft_files import FILE, SECTION


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture
def folder(tmp_path, model):
    save_drafter(make(model), tmp_path)
    return tmp_path


def edit(folder, rename=lambda name: name, drop=(), add=None, **keys):
    """Change tensors, and the keys of the section; a key that becomes None goes."""
    tensors = {rename(n): t for n, t in load_file(folder / FILE).items() if n not in drop}
    save_file({**tensors, **(add or {})}, folder / FILE)
    data = json.loads((folder / "config.json").read_text())
    data[SECTION] = {k: v for k, v in {**data[SECTION], **keys}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(data))


def rewrite(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def assert_same(ours, theirs):
    assert ours.config == theirs.config
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_round_trip(tmp_path, model, options):
    drafter = make(model, **options)
    save_drafter(drafter, tmp_path, metadata={"made": "here"})
    back = load_drafter(tmp_path, model)
    assert_same(back, drafter)
    assert not back.training
    assert not any(p.requires_grad for p in back.parameters())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", FILE]


def test_beside_the_model(tmp_path, model):
    """The model's config keeps all its keys; model and drafter are read, and draft, independently of each other."""
    save(model, tmp_path)
    save_drafter(make(model), tmp_path, dtype=torch.bfloat16)
    assert InklingConfig.from_pretrained(tmp_path) == model.config
    target = load(tmp_path)
    drafter = load_drafter(tmp_path, target)
    assert drafter.fc.weight.dtype == torch.float32
    assert generate(target, PROMPTS, 9, drafter=drafter).tokens == generate(model, PROMPTS, 9).tokens
    narrow = load(tmp_path, dtype=torch.bfloat16)
    assert load_drafter(tmp_path, narrow).fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("prefix", ["model.mtp.", "mtp.", "model.", ""])
def test_prefixes_and_inkling_names(folder, model, prefix):
    raw = {
        "self_attn.": "attn.", "q_proj": "wq_du", "k_proj": "wk_dv", "v_proj": "wv_dv", "o_proj": "wo_ud",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
    }  # fmt: skip

    def rename(name):
        for ours, theirs in raw.items():
            name = name.replace(ours, theirs)
        return prefix + name

    edit(folder, rename)
    assert_same(load_drafter(folder, model), make(model))


def test_a_folder_of_its_own(folder, model):
    (folder / FILE).rename(folder / "model.safetensors")
    assert_same(load_drafter(folder, model), make(model))


def test_sizes_come_from_the_tensors(folder, model):
    rewrite(folder, {SECTION: {"target_layer_ids": [1, 3, 4], "mask_token_id": 45, "block_size": 5}})
    assert_same(load_drafter(folder, model), make(model))


def test_the_kind_is_told_in_two_lines(folder, model):
    """From tensors and config, without a run."""
    kind = load_drafter(folder, model).config.kind
    assert kind == (
        "2 layers, rnn head of rank 7, 4 tokens a block, taps 1, 3, 4\nwith relative bias, gate, sink, confidence"
    )
    assert make(model, **OPTIONS["deepspec"]).config.kind == (
        "2 layers, vanilla head of rank 7, 4 tokens a block, taps 0, 2\nwith RoPE, confidence"
    )
    assert ", no Markov head, " in make(model, **OPTIONS["no_head"]).config.kind


def test_tables_without_unused_rows(folder, model):
    tables = {f"markov_head.markov_w{i}.weight": torch.randn(40, 7) for i in (1, 2)}
    edit(folder, add=tables)
    drafter = load_drafter(folder, model)
    for name, table in tables.items():
        assert torch.equal(drafter.state_dict()[name][:40], table)


def test_copies_of_the_targets_tables(folder, model):
    copies = {"embed_tokens.weight": model.llm.embed.weight, "lm_head.weight": model.llm.unembed.weight}
    edit(folder, add={name: t.clone() for name, t in copies.items()})
    assert_same(load_drafter(folder, model), make(model))
    edit(folder, add={"lm_head.weight": model.llm.unembed.weight + 1})
    with pytest.raises(InputError, match=r"lm_head\.weight is not the target's llm\.unembed\.weight"):
        load_drafter(folder, model)


SPELLINGS = {
    "ours": {"target_layer_ids": [1, 3], "block_size": 5, "mask_token_id": 45},
    "dspark": {"dspark_target_layer_ids": [1, 3], "dspark_block_size": 5, "dspark_noise_token_id": 45},
    "speculators": {"eagle_aux_hidden_state_layer_ids": [2, 4], "block_size": 5, "mask_token_id": 45},
    "aux": {"aux_hidden_state_layer_ids": [2, 4], "block_size": 5, "mask_token_id": 45, "draft_vocab_size": 40},
}


@pytest.mark.parametrize("where", ["top level", "mtp_config", "dspark_config", "dflash_config"])
@pytest.mark.parametrize("keys", SPELLINGS.values(), ids=SPELLINGS)
def test_case_57_keys_at_top_level_and_nested(tmp_path, model, keys, where):
    drafter = make(model, target_layer_ids=[1, 3])
    save_drafter(drafter, tmp_path)
    # of the target, were it its file
    other = {"model_type": "inkling2_text", "num_hidden_layers": 48, "head_dim": 128, "hidden_size": 4608}
    rewrite(tmp_path, {**other, **keys} if where == "top level" else {**other, where: keys})
    assert_same(load_drafter(tmp_path, model), drafter)


def test_windows_from_layer_types(folder, model):
    edit(folder, windows=None, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    assert load_drafter(folder, model).config.windows == [6, None]


def test_choices_win(folder, model):
    choices = {"sample_from_anchor": True, "tap": "mixed", "embed_norm": False, "softcap": False, "is_causal": True}
    config = load_drafter(folder, model, **choices).config
    assert {key: getattr(config, key) for key in choices} == choices
    with pytest.raises(InputError, match="unknown choice causal"):
        load_drafter(folder, model, causal=True)
    with pytest.raises(InputError, match="head_dim is -1, expected at least 1"):
        load_drafter(folder, model, head_dim=-1)


def test_unknown_keys_warn(folder, model):
    edit(folder, fusion="sum")
    with pytest.warns(UserWarning, match="unknown keys of the drafter ignored: fusion"):
        load_drafter(folder, model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"add": {"layers.0.self_attn.k_sconv.weight": torch.ones(3)}},
            r"0.self_attn.k_sconv.weight is unknown",
        ),
        ({"add": {"mtp.enorm.weight": torch.ones(3)}}, r"mtp.enorm.weight is unknown"),
        ({"drop": ["hidden_norm.weight"]}, "hidden_norm.weight is missing"),
        ({"drop": ["fc.weight"]}, "fc.weight is missing"),
        ({"drop": ["layers.1.mlp.up_proj.weight"]}, "layers.1.mlp.up_proj.weight is missing"),
        ({"add": {"norm.weight": torch.ones(31)}}, r"norm.weight is F32 \[31\], expected floats \[32\]"),
        ({"add": {"norm.weight": torch.ones(32, dtype=torch.int8)}}, r"norm.weight is I8 \[32\]"),
        ({"add": {"mtp.norm.weight": torch.ones(32)}}, "are the same tensor, norm.weight"),
        ({"target_layer_ids": [1, 3]}, r"target_layer_ids is \[1, 3\], but fc.weight reads 3 taps of 32"),
        ({"target_layer_ids": None}, "target_layer_ids is missing"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"markov_rank": 8}, "the config says markov_rank 8, the tensors say 7"),
        ({"markov_head_type": "vanilla"}, "the config says markov_head_type 'vanilla', the tensors say 'rnn'"),
        ({"enable_confidence_head": False}, "the config says enable_confidence_head False"),
        ({"draft_vocab_size": 20}, "draft_vocab_size is 20, expected the target's vocabulary, 40"),
        ({"tap": "around"}, "tap is 'around'"),
        ({"block_size": "8"}, "block_size is '8', expected int"),
        ({"block_size": 10**9}, "block_size is 1000000000, expected at most max_position_embeddings"),
        ({"is_causal": "no"}, "is_causal is 'no', expected bool"),
        ({"target_layer_ids": 3}, "target_layer_ids is 3, expected list"),
        ({"rope_theta": -1}, "rope_theta is -1, expected more than 0"),
        ({"windows": [0, 4]}, r"windows is \[0, 4\], expected at least 1"),
        ({"aux_hidden_state_layer_ids": 5}, "aux_hidden_state_layer_ids is 5, expected a list"),
        ({"layer_types": [1, 2]}, r"layer_types is \[1, 2\], expected a list of names"),
        ({"add": {"confidence_head.proj.weight": torch.ones(39)}}, r"confidence_head.proj.weight is \[39\]"),
        ({"add": {"layers.0.self_attn.q_l2_clip.scale": torch.ones(4, 0)}}, r"q_l2_clip.scale is \[4, 0\]"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(folder, model, change, named):
    edit(folder, **change)
    with pytest.raises(InputError, match=named):
        load_drafter(folder, model)


def test_no_file(tmp_path, model):
    with pytest.raises(InputError, match=r"no drafter, expected mtp\.safetensors"):
        load_drafter(tmp_path, model)


def test_a_failed_save_leaves_the_folder_as_it_was(folder, model):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    broken = make(model, seed=9)
    with pytest.raises((TypeError, AttributeError)):
        save_drafter(broken, folder, metadata={"made": object()})
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
