"""Inkling 2 Small, as a reference: exact, readable, and runnable on a laptop.

    import inkling_ref as ir

    model, tokenizer = ir.load(folder), ir.Tokenizer.from_pretrained(folder)
    parts = [{"type": "image", "image": "picture.png"}, "What colour is the circle?"]
    prompt = ir.render([{"role": "user", "content": parts}], tokenizer)
    result = ir.generate(
        model, [prompt.input_ids], pixel_values=prompt.pixel_values, image_grid_thw=prompt.image_grid_thw
    )
    print(tokenizer.decode(result.tokens[0]))

One letter means one thing, in code, equations, figures and prose::

    B  batch rows                              T  tokens of this call
    S  source positions: keys and values,      t, s, delta = t - s  positions, distance
       or inputs of a short convolution        n  sources of the depth state
    V  vocabulary (stored rows)                D  hidden size
    L  layers                                  H  query heads
    G  key/value heads                         d  head size
    R  relative channels a head (d_rel)        X  distances that carry a relative bias
    W  window of a sliding layer               K  taps of a short convolution, on C channels
    E  experts                                 k  experts a token visits
    I  expert width                            N  rows of a matrix, or tokens flattened to B*T

`q`, `k`, `v`, `r` in lower case are the query, key, value and relative states of attention; where `k` could
be read both ways the code writes `num_experts_per_tok`. Some modules keep letters of their own: in `quantization` K
are the columns of a weight [E, N, K], as the format's tensors are described; in `vision` D is the encoder's width;
where tokens are drafted, C is the drafter's context, N are the slots of a block, gamma the tokens that it drafts and n
those of one round, k a place among them, r the rank of its head.

A component is a stem: `inkling_ref/short_conv.py`, `tests/test_short_conv.py` and so on. They import downwards only:
errors, files and config, residual, then short_conv, quantization and vision, then attention and moe, then backends and
cache, model, dspark, then fused, tensor_files and chat, checkpoint and decode_step, draft_files, sampling and stepping,
speculative and draft_step, generation, cli and notebook.
Names below load on first use, so that importing the package, or asking the command line for help, does not wait for
torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "InputError": "errors",
    "InklingConfig": "config",
    "TextConfig": "config",
    "VisionConfig": "config",
    "Inkling": "model",
    "load": "checkpoint",
    "save": "checkpoint",
    "load_image": "vision",
    "process_images": "vision",
    "DSparkConfig": "draft_config",
    "Drafter": "dspark",
    "load_drafter": "draft_files",
    "save_drafter": "draft_files",
    "Drafting": "speculative",
    "Threshold": "speculative",
    "Throughput": "speculative",
    "DecodeStep": "decode_step",
    "DraftStep": "draft_step",
    "generate": "generation",
    "stream": "generation",
    "Tokenizer": "chat",
    "render": "chat",
    "parse": "chat",
    "nvfp4_quantize": "quantization",
    "nvfp4_dequantize": "quantization",
    "mxfp8_quantize": "quantization",
    "mxfp8_dequantize": "quantization",
    "Trace": "measure.trace",
    "trace": "measure.trace",
    "compare": "measure.compare",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
