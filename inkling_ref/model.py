r"""The whole model: decoder layer, text stack, and the multimodal wrapper.

One decoder layer i, on the depth state (see `residual` for `mix`, `attention`, `moe`, `short_conv` for the rest):

$$ y = \mathrm{Conv}(\mathrm{Attn}(\mathrm{RMSNorm}(\mathrm{mix}_q(\mathrm{blocks}, \mathrm{partial})))) $$

$$ \text{at a block boundary:} \;\; \mathrm{blocks} \leftarrow \mathrm{blocks} + [\mathrm{partial}], \;
   \mathrm{partial} \leftarrow y; \qquad \text{else} \;\; \mathrm{partial} \leftarrow \mathrm{partial} + y $$

$$ \mathrm{partial} \leftarrow \mathrm{partial} +
   \mathrm{Conv}(\mathrm{MoE}(\mathrm{RMSNorm}(\mathrm{mix}_m(\mathrm{blocks}, \mathrm{partial})))) $$

and at the end

$$ \mathrm{logits} = \mathrm{cap}_{30}(W_u \, \mathrm{RMSNorm}(\mathrm{mix}_o(\mathrm{blocks}, \mathrm{partial}))) $$

A boundary is a layer whose index is divisible by n_layers_per_attn_res_block, so the token embedding becomes block 0
at layer 0, which has nothing to mix yet and reads it directly.

Parameter names are the released tensor names without their leading `model.`: the state dict is the file format.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Attention
from .backends import Backend, get_backend
from .cache import Cache, LayerCache, Step
from .config import InklingConfig, TextConfig
from .errors import InputError
from .moe import MoE, softcap
from .residual import AttentionResidualQueries, DepthState, RMSNorm, rms_norm, wide
from .short_conv import ShortConv
from .vision import VisionModel


def keeps_float32(name: str) -> bool:
    """Whether that tensor stays float32 in a 16-bit model: static convolutions, router, residual queries."""
    return name.endswith("sconv.weight") or ".mlp.gate." in name or ".attn_res." in name


class DecoderLayer(nn.Module):
    """One layer: attention and MoE, each reading a mixture of the depth state and adding to its running sum."""

    def __init__(self, config: TextConfig, layer: int, ops: Backend) -> None:
        super().__init__()
        self.ops = ops
        self.starts_block = config.starts_block(layer)
        self.eps = config.rms_norm_eps
        D, K = config.hidden_size, config.conv_kernel_size
        self.is_sliding = config.is_sliding(layer)
        if self.is_sliding:
            self.attn_norm = RMSNorm(D)
        else:
            self.q_input_norm, self.k_input_norm, self.v_input_norm = RMSNorm(D), RMSNorm(D), RMSNorm(D)
        self.attn = Attention(config, layer, ops)
        self.attn_sconv = ShortConv(D, K, ops)
        self.mlp_norm = RMSNorm(D)
        self.mlp = MoE(config, ops)
        self.mlp_sconv = ShortConv(D, K, ops)

    def forward(
        self,
        depth: DepthState,
        attention_queries: Float[Tensor, " D"] | Float[Tensor, "3 D"] | None,
        mlp_query: Float[Tensor, " D"],
        step: Step,
        cache: LayerCache | None,
    ) -> DepthState:
        dtype = depth.partial.dtype
        norms = [self.attn_norm] if self.is_sliding else [self.q_input_norm, self.k_input_norm, self.v_input_norm]
        weights = [norm.weight for norm in norms]
        inputs = self.ops.mix_and_norm(depth.sources(), attention_queries, weights, self.eps, dtype)
        x_q, x_k, x_v = inputs * 3 if self.is_sliding else inputs
        y = self.attn_sconv(self.attn(x_q, x_k, x_v, step, cache), step, cache and cache.attention_conv)

        depth = (depth.close_block() if self.starts_block else depth).add(y)
        (h,) = self.ops.mix_and_norm(depth.sources(), mlp_query, [self.mlp_norm.weight], self.eps, dtype)
        z = self.mlp_sconv(self.mlp(h), step, cache and cache.mlp_conv)
        return depth.add(z).round(dtype)


class TextModel(nn.Module):
    """`model.llm`: embedding, layers, output mixture, unembedding."""

    def __init__(self, config: TextConfig, ops: Backend) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        D = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, D)
        self.embed_norm = RMSNorm(D)
        self.layers = nn.ModuleList(DecoderLayer(config, i, ops) for i in range(config.num_hidden_layers))
        self.attn_res = AttentionResidualQueries(D, [1 if layer.is_sliding else 3 for layer in self.layers])
        self.norm = RMSNorm(D)
        self.unembed = nn.Linear(D, config.vocab_size, bias=False)

    def embed_tokens(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        e = self.embed(ids)
        return rms_norm(e, self.embed_norm.weight, self.config.rms_norm_eps).to(e.dtype)

    def forward(self, e: Float[Tensor, "B T D"], step: Step, cache: Cache | None = None) -> Float[Tensor, "B T D"]:
        """From normed embeddings to the hidden state that enters the unembedding."""
        depth = DepthState.start(e)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        for i, (layer, m, c) in enumerate(zip(self.layers, self.attn_res.mlp_queries, caches, strict=True)):
            q = self.attn_res.attn_queries[i - 1] if i else None  # layer 0 has one source: nothing to mix
            depth = layer(depth, q, m, step, c)
        query, eps = self.attn_res.output_query, self.config.rms_norm_eps
        return self.ops.mix_and_norm(depth.sources(), query, [self.norm.weight], eps, e.dtype)[0]

    def logits(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """Soft-capped logits of the used vocabulary, in `wide` precision. Padded rows have none."""
        weight = self.unembed.weight[: self.config.unpadded_vocab_size]
        return softcap(wide(F.linear(hidden, weight)), self.config.final_logit_softcapping)


@dataclass
class Output:
    """logits [B, T, V used] in float32 (float64 in a float64 model); hidden [B, T, D], what the unembedding reads."""

    logits: Float[Tensor, "B t V"]
    hidden: Float[Tensor, "B T D"]


class Inkling(nn.Module):
    """Inkling 2: the text stack `llm` and, if the config has one, the image encoder `visual`."""

    def __init__(self, config: InklingConfig, backend: str | Backend = "torch") -> None:
        super().__init__()
        self.config = config
        self.backend = get_backend(backend)
        self.llm = TextModel(config.text, self.backend)
        self.visual = None if config.vision is None else VisionModel(config.vision, config.text.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.llm.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.llm.embed.weight.device

    def cast(self, dtype: torch.dtype) -> "Inkling":
        """Convert in place to `dtype`; in a 16-bit model the tensors of `keeps_float32` stay float32."""
        for name, parameter in self.named_parameters():
            keep = keeps_float32(name) and dtype.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if keep else dtype)
        return self

    def quantize_activations(self, enabled: bool = True) -> "Inkling":
        """Fake-quantise what enters the experts' products, in the format of each layer's stored weights."""
        fake = {"nvfp4": self.backend.fake_nvfp4, "mxfp8": self.backend.fake_mxfp8, "bf16": None}
        for experts in (layer.mlp.experts for layer in self.llm.layers):
            experts.quantize = fake[experts.stored_format] if enabled else None
        return self

    def kernel_report(self) -> dict[str, str]:
        """Operation -> implementation that runs it."""
        return self.backend.report()

    def new_cache(self, batch_size: int = 1, rollback: int = 32) -> Cache:
        """An empty cache for `batch_size` sequences; `rollback` as in `Cache`."""
        return Cache(self.config.text, batch_size, self.dtype, self.device, rollback)

    def image_features(
        self, pixel_values: Float[Tensor, "tiles p p 3"], image_grid_thw: Int[Tensor, "images 3"]
    ) -> Float[Tensor, "tiles D"]:
        """One feature per image tile, images in order. Raises InputError if the model has no image encoder."""
        if self.visual is None:
            raise InputError("pixel_values: this model has no image encoder (its config has no vision_config)")
        return self.visual(pixel_values, image_grid_thw)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        pixel_values: Float[Tensor, "tiles p p 3"] | None = None,
        image_grid_thw: Int[Tensor, "images 3"] | None = None,
        cache: Cache | None = None,
        attention_mask: Bool[Tensor, "B T"] | Int[Tensor, "B T"] | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        image_features: Float[Tensor, "tiles D"] | None = None,
        logits_to_keep: int = 0,
    ) -> Output:
        """Logits of every token.

        Args:
            input_ids: tokens to append after each row's cached positions (or from position 0).
            pixel_values, image_grid_thw: the images of this call, from `process_images`; their features fill the
                image-token positions in order, row by row.
            cache: extended by this call.
            attention_mask: true = token, false = padding, left or right or both. A row gives what it gives alone;
                outputs at padded positions are zero.
            document_ids: packed documents; equal neighbouring ids are one document, which sees only itself.
            image_features: instead of pixel_values, features computed before (chunked prefill).
            logits_to_keep: only the last n positions' logits; 0 = all.

        Raises InputError naming an id out of range, a shape that does not fit, or unequal tile and token counts.
        """
        _check_inputs(self.config, input_ids, cache, attention_mask, document_ids)
        if pixel_values is not None:
            image_features = self.image_features(pixel_values, image_grid_thw)
        B, T = input_ids.shape
        counts, order = [T] * B, None
        if attention_mask is not None and not attention_mask.all():
            # Move each row's tokens to its front, in order. Padding then comes last: nothing that matters sees it,
            # and a row's positions, caches and convolutions are those of the row alone.
            mask = attention_mask.bool()
            order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
            input_ids = input_ids.gather(1, order)
            counts = mask.sum(dim=1).tolist()

        if cache is not None:
            cache.begin()
        step = Step.make([0] * B if cache is None else cache.lengths, T, input_ids.device, document_ids)
        e = self.llm.embed_tokens(input_ids)
        e = self._place_images(e, input_ids, image_features, counts, cache)
        hidden = self.llm(e, step, cache)
        if cache is not None:
            cache.commit(counts)
        if order is not None:
            hidden = torch.where(_before(counts, input_ids)[..., None], hidden, 0)
            hidden = hidden.gather(1, order.argsort(dim=1)[..., None].expand_as(hidden))
        return Output(self.llm.logits(hidden[:, -logits_to_keep:]), hidden)

    def _place_images(
        self, e: Tensor, input_ids: Tensor, features: Tensor | None, counts: list[int], cache: Cache | None
    ) -> Tensor:
        """Image features replace the embeddings of image tokens, after the embedding norm."""
        if features is None and (self.visual is None or (cache is not None and cache.length > 0)):
            return e  # while decoding, a sampled image token is a token like any other
        places = (input_ids == self.config.image_token_id) & _before(counts, input_ids)
        wanted, given = int(places.sum()), 0 if features is None else features.shape[0]
        if wanted != given:
            raise InputError(f"images: the text has {wanted} image tokens, the images have {given} tiles")
        if given and features.shape[1:] != e.shape[2:]:
            raise InputError(f"image_features: {tuple(features.shape)}, expected {(given, e.shape[2])}")
        return e if features is None else e.masked_scatter(places[..., None], features.to(e))


def _before(counts: list[int], like: Tensor) -> Bool[Tensor, "B T"]:
    """True for the first counts[b] positions of row b."""
    return torch.arange(like.shape[1], device=like.device) < torch.tensor(counts, device=like.device)[:, None]


def _check_inputs(
    config: InklingConfig, input_ids: Tensor, cache: Cache | None, mask: Tensor | None, document_ids: Tensor | None
) -> None:
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64) or input_ids.numel() == 0:
        raise InputError(f"input_ids: {input_ids.dtype} {tuple(input_ids.shape)}, expected integers [B, T], not empty")
    for name, t in (("attention_mask", mask), ("document_ids", document_ids)):
        if t is not None and (t.shape != input_ids.shape or t.is_floating_point()):  # 0 and -inf would be inverted
            raise InputError(f"{name}: {t.dtype} {tuple(t.shape)}, expected integers or bools {tuple(input_ids.shape)}")
    used = config.text.unpadded_vocab_size
    low, high = (int(x) for x in input_ids.aminmax())
    if low < 0 or high >= used:
        raise InputError(f"input_ids: token id {low if low < 0 else high}, expected 0 <= id < {used}")
    if cache is not None and len(cache.lengths) != input_ids.shape[0]:
        raise InputError(f"cache: made for {len(cache.lengths)} rows, input_ids has {input_ids.shape[0]}")
    if document_ids is not None and (cache is not None or mask is not None):
        raise InputError("document_ids: packed documents take neither a cache nor an attention_mask")
