"""Faults that each notebook's own Verify cells must notice: stem -> [(attribute to break, how), ...].

The attribute is `module.name` of `inkling_ref`; `how` takes the original and returns the broken one. Mend nothing
here when a notebook changes: a fault that goes unnoticed means that a Verify cell has stopped verifying.
"""

from collections.abc import Callable
from typing import Any

MUTATIONS: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    "short_conv": [
        ("short_conv.short_conv", lambda f: lambda u, weight, *rest: f(u, weight.flip(-1), *rest)),  # the file's order
        ("short_conv.dynamic_short_conv", lambda f: lambda u, taps, *rest: f(u, taps.flip(2), *rest)),  # heads swapped
        ("short_conv.with_history", lambda f: lambda x, past, state: f(x, past, None)),  # nothing kept between calls
    ],
    "residual": [
        ("residual.mix", lambda f: lambda s, q, eps: f(s, q * q.shape[-1] ** 0.5, eps)),  # sqrt(D) forgotten
        ("residual.mix_and_norm", lambda f: lambda s, q, *rest: f(s, q if q is None else -q, *rest)),  # the wrong end
    ],
    "quantization": [
        ("quantization._unpack_e2m1", lambda f: lambda codes: f(codes >> 4 | codes << 4)),  # nibbles swapped
        ("quantization._nvfp4_round", lambda f: lambda w, amax, outer, target: f(w, amax, outer, 6.0)),  # never four
        ("quantization._mxfp8_round", lambda f: lambda w: (f(w)[0], f(w)[1] + 1)),  # the wrong power of two
    ],
    "attention": [
        ("attention.l2_clip", lambda f: lambda u, threshold: f(u, 1.1 * threshold)),
        ("attention.relative_bias", lambda f: lambda r, P, distance: f(r, P[:, :-1], distance)),  # extent one short
        ("attention.softmax_with_sink", lambda f: lambda scores, sink: scores.softmax(-1)),  # no sink
        ("attention.log_scale", lambda f: lambda u, t, *rest: f(u, t - 1, *rest)),  # counts from 0
        ("attention.attend", lambda f: lambda *a: f(*a[:8], a[8] and a[8] + 1, *a[9:])),  # a window of W + 1
    ],
    "model": [
        ("residual.DepthState.close_block", lambda f: lambda depth: depth),  # the old sum runs on
        ("model.TextModel.logits", lambda f: lambda self, hidden: self.unembed(hidden)),  # no soft cap
        ("cache.Cache.crop", lambda f: lambda self, length: setattr(self, "lengths", [length - 1])),  # one too many
        ("measure.cost.cache_bytes", lambda f: lambda config, S: f(config, S + 1)),
    ],
    "vision": [
        ("vision.patchify", lambda f: lambda tiles, merge: f(tiles.transpose(2, 3), merge)),  # columns before rows
        ("vision.position_weights", lambda f: lambda place, size, *rest: f(place.flip(-1), size.flip(-1), *rest)),
        ("vision.rotary_angles", lambda f: lambda place, d, theta: f(place.flip(-1), d, theta)),
        ("vision.LayerScale.forward", lambda f: lambda self, x, y: x + y),
    ],
    "train_nano": [
        # An answer counts as little as any text.
        ("nano.train.losses", lambda f: lambda llm, h, labels, worth: f(llm, h, labels, worth.clamp(max=1))),
        ("nano.muon.orthogonal", lambda f: lambda g: 1.1 * f(g)),
        # The correction bias pushes towards the full experts.
        ("nano.train.Trainer.update", lambda f: lambda self: (self.balance_rate.neg_(), f(self))[1]),
    ],
    "moe": [
        ("moe.softcap", lambda f: lambda x, cap: x),  # no cap
        # Gate rows first, then up rows, instead of interleaved.
        ("moe.softcapped_swiglu", lambda f: lambda gu, *caps: f(gu.view(len(gu), 2, -1).mT.flatten(1), *caps)),
        ("moe.route", lambda f: lambda h, w, bias, *rest: f(h, w, 0 * bias, *rest)),  # the bias forgotten
        ("moe.experts", lambda f: lambda h, w, ids, *rest: f(h, w / w.sum(-1, keepdim=True), ids, *rest)),  # no scale
    ],
    "validate_your_port": [
        ("measure.differences.difference", lambda f: lambda a, b, n=2: f(a, a, n)),  # sees nothing
        ("measure.differences.systematic", lambda f: lambda a, b: 1.0),  # sees faults everywhere
        ("moe.softcap", lambda f: lambda x, cap: x),  # the reference is wrong
        ("measure.adapters.recorded._order_choices", lambda f: lambda tensors: None),  # experts best first
    ],
    "dspark": [
        ("sampling.accept", lambda f: lambda p, q, *rest: f(p, q.sqrt(), *rest)),  # not what drafts were drawn from
        ("dspark.Drafter.fuse", lambda f: lambda self, taps: f(self, {**taps, 5: taps[11]})),  # one tap twice
        ("dspark.Drafter.slots", lambda f: lambda self, anchors: f(self, anchors).flip(-1)),  # the anchor last
        ("dspark.MarkovHead.step", lambda f: lambda self, h, x, s, used: f(self, h, x, 0 * s, used)),  # state forgotten
    ],
    "kernels": [
        ("kernels.residual.mix_and_norm", lambda f: lambda s, q, *rest: f(s, q if q is None else -q, *rest)),
        ("kernels.attention.attend", lambda f: lambda *a: f(*a[:5], a[5] - 1, *a[6:])),  # a weaker sink
        ("kernels.decode.transposed", lambda f: lambda P: f(P.flip(0))),  # the profiles in another order
        ("attention.relative_bias", lambda f: lambda r, P, distance: f(r, P, distance + 1)),  # the next distance
        ("attention.softmax_with_sink", lambda f: lambda scores, sink: scores.softmax(-1)),  # no sink
        ("residual.mix", lambda f: lambda s, q, eps: f(s, q * q.shape[-1] ** 0.5, eps)),  # sqrt(D) forgotten
        ("measure.cost.cache_bytes", lambda f: lambda config, S: f(config, S + 1)),
    ],
    "parallel": [
        ("parallel.plan._part", lambda f: lambda count, parts, index: f(count, parts, 0)),  # the first channels for all
        ("parallel.layers.ShardedMoE.owned", lambda f: lambda self, h, w, ids: f(self, h, w, ids + 1)),
        ("parallel.plan.owners", lambda f: lambda plan, E: f(plan, E)[::-1]),  # the last experts for the first rank
    ],
    "full_scale": [
        ("parallel.in_turn._copy", lambda f: lambda made, outs: None),  # a collective that gives nothing
        ("parallel.plan._part", lambda f: lambda count, parts, index: f(count, parts, 0)),  # the first heads for all
        ("parallel.estimate.estimate", lambda f: lambda c, p, t, S, *rest, **o: f(c, p, t, 2 * S, *rest, **o)),
    ],
}
