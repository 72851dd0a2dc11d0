"""`compare` names the right section for every fault of `faults.py`, and none for implementations that are healthy."""

from functools import cache

import pytest
import torch
from faults import CONFIG, FAULTS, ROWS, TOKENS, healthy, inputs
from helpers import unchecked
from torch import Tensor, nn

from inkling_ref.checkpoint import load, save
from inkling_ref.errors import InputError
from inkling_ref.measure import report
from inkling_ref.measure.adapters import transformers as adapter
from inkling_ref.measure.compare import Comparison, compare
from inkling_ref.measure.replay import replay
from inkling_ref.measure.sections import SECTIONS, order, parse
from inkling_ref.measure.trace import Trace, trace

# In bfloat16 these lie within the noise of a comparison with float32: only replaying finds them.
REPLAY_FINDS = {
    "sink in base two",
    "log scaling one position late",
    "GELU by tanh",
    "GELU by sigmoid",
    "sliding cache loses its oldest key",
}


@cache
def right(dtype: torch.dtype) -> nn.Module:
    return healthy(dtype)


@cache
def reference(dtype: torch.dtype) -> Trace:
    return run(right(dtype))


def run(model: nn.Module, **changed) -> Trace:
    with unchecked():
        return trace(model, sections=["all"], **{**inputs(), **changed})


def compared(*traces: Trace, **how) -> Comparison:
    with unchecked():
        return compare(*traces, **how)


def replayed(port: Trace, until: str = "step.9.logits"):
    """The reference in bfloat16 on what the port recorded, up to a section: what follows it costs time only."""

    def result(name: str) -> Tensor:
        if order(name) > order(until):
            raise InputError(f"{name}: not to be replayed")
        return replay(right(torch.bfloat16), port, name)

    return result


def test_enough_faults_of_every_part():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    stems = {parse(fault.section).section.name.split(".")[0] for fault in FAULTS}
    assert stems == {section.name.split(".")[0] for section in SECTIONS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_float32(fault):
    found = compared(reference(torch.float32), fault.trace(right(torch.float32)))
    assert found.exit_status == 1
    assert found.first.name == fault.section
    if found.first.inputs:
        assert "This section is wrong" in report.blame(found)
    before = found.rows[: found.rows.index(found.first)]
    assert {row.status for row in before} <= {"agrees"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_bfloat16(fault):
    """A port in bfloat16 beside the reference in float32: plainly, and with the port's inputs replayed."""
    port = fault.trace(right(torch.bfloat16))
    plain = compared(reference(torch.float32), port)
    until = max("vision.patches", fault.section, key=order)  # pixels are read, not computed: what follows is replayed
    sharp = compared(reference(torch.float32), port, replayed=replayed(port, until))
    assert sharp.first.name == fault.section
    assert sharp.first.own is not None or not sharp.first.section.inputs
    found = None if plain.first is None else plain.first.name
    assert found == (None if fault.name in REPLAY_FINDS else fault.section)


# --- Healthy pairs -------------------------------------------------------------------------------------------------


def agree(found: Comparison, sections: int = 250) -> None:
    assert found.exit_status == 0, (found.first, found.hints)
    assert len(found.rows) >= sections


def test_float64_and_float32():
    agree(compared(reference(torch.float64), reference(torch.float32)))


def test_float32_and_bfloat16():
    port = reference(torch.bfloat16)
    agree(compared(reference(torch.float32), port))
    agree(compared(reference(torch.float32), port, replayed=replayed(port)))
    agree(compared(port, reference(torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_one_pass_and_a_cache(dtype):
    """All tokens at once, beside a prompt and one-token steps through caches and rolling convolutions."""
    kwargs = inputs()
    ids, steps = kwargs["input_ids"], 9
    whole = run(right(dtype), decode=0)
    cached = run(right(dtype), input_ids=ids[:, :-steps], decode=ids[:, -steps:])
    found = compared(whole, cached)
    agree(found)
    assert {parse(row.name).step for row in found.rows} == set(range(steps + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_packed_and_dequantised_experts(dtype, tmp_path):
    save(right(torch.bfloat16), tmp_path / "model", experts="nvfp4+mxfp8")
    packed, dense = (load(tmp_path / "model", dtype=dtype, experts=how) for how in ("packed", "dequantize"))
    assert packed.llm.layers[0].mlp.experts.w13_weight.dtype == torch.uint8
    agree(compared(run(dense), run(packed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_transformers(dtype, tmp_path):
    """The public implementation beside ours: text, pictures, prompt and decoding."""
    from transformers import Inkling2ForConditionalGeneration

    save(right(dtype), tmp_path / "model")
    theirs = Inkling2ForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    port = adapter.trace(theirs, sections=["all"], **inputs())
    agree(compared(reference(dtype), port), sections=200)
    agree(compared(reference(torch.float32), port), sections=200)
    if dtype == torch.bfloat16:
        agree(compared(reference(torch.float32), port, replayed=replayed(port)), sections=200)


def test_the_sizes_are_distinct():
    """Equal sizes would hide exchanged axes."""
    t, v = CONFIG.text, CONFIG.vision
    sizes = [
        t.hidden_size, t.num_attention_heads, t.num_key_value_heads, t.head_dim, t.swa_num_attention_heads,
        t.swa_num_key_value_heads, t.swa_head_dim, t.d_rel, t.sliding_window_size, t.rel_extent, t.n_routed_experts,
        t.num_experts_per_tok, t.moe_intermediate_size, t.vocab_size, t.unpadded_vocab_size, v.hidden_size,
        v.intermediate_size, v.projection_hidden_dim, ROWS, TOKENS,
    ]  # fmt: skip
    assert len(set(sizes)) == len(sizes)
