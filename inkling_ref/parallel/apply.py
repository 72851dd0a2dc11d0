"""From a plain model to one rank of a world: parameters are cut, four kinds of modules take over, the cache shrinks.

The core knows nothing of it. Names of parameters stay those of the release, so that `load` reads of every tensor what
the table of `plan.Share` says, and nothing else.
"""

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..backends import Backend
from ..cache import Cache
from ..checkpoint import check, empty_model, fill
from ..config import InklingConfig
from ..errors import InputError
from ..model import Inkling
from ..quantization import COMPANIONS
from ..tensor_files import CheckpointReader
from .collectives import Group, StandIn, Traffic
from .layers import Pass, ShardedConv, ShardedEmbedding, ShardedHead, ShardedMoE
from .plan import Plan, Share, stored_slices
from .step import Ranks

TIMEOUT = timedelta(seconds=120)


@dataclass
class Mesh:
    """One rank's groups: all ranks (world), those that share its attention (tp), its like in other groups (dp)."""

    plan: Plan
    rank: int
    world: Group
    tp: Group
    dp: Group
    traffic: Traffic

    @classmethod
    def join(cls, plan: Plan, device_type: str = "cpu", timeout: timedelta = TIMEOUT) -> "Mesh":
        """Of the processes of the default process group: every collective of every group has the timeout.

        Raises:
            InputError: another number of processes than the plan has ranks.
        """
        started = dist.get_world_size() if dist.is_initialized() else 1
        if started != plan.world:
            raise InputError(f"{started} processes, expected tp {plan.tp} x dp {plan.dp} = {plan.world}")
        rank = dist.get_rank() if started > 1 else 0
        traffic = Traffic()
        if started == 1:
            return cls(plan, 0, *(Group(name, 1, 0, traffic) for name in ("world", "tp", "dp")), traffic)
        grid = torch.arange(plan.world).view(plan.dp, plan.tp)
        # A DeviceMesh that makes its groups itself gives them the default timeout of half an hour.
        tp, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
        dp, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
        mesh = DeviceMesh.from_group([dp, tp], device_type, grid, mesh_dim_names=("dp", "tp"))
        tp, dp = (
            Group(name, mesh[name].size(), mesh[name].get_local_rank(), traffic, mesh[name].get_group())
            for name in ("tp", "dp")
        )
        return cls(plan, rank, Group("world", plan.world, rank, traffic, dist.group.WORLD), tp, dp, traffic)

    @classmethod
    def stand_in(cls, plan: Plan, rank: int) -> "Mesh":
        """Rank `rank` alone, with stand-ins for every collective."""
        if not 0 <= rank < plan.world:
            raise InputError(f"rank {rank}, expected 0 <= rank < {plan.world}")
        traffic = Traffic()
        dp_index, tp_index = divmod(rank, plan.tp)
        sizes = (("world", plan.world, rank), ("tp", plan.tp, tp_index), ("dp", plan.dp, dp_index))
        return cls(plan, rank, *(StandIn(*size, traffic) for size in sizes), traffic)


def parallelize(model: Inkling, mesh: Mesh) -> Inkling:
    """Turn a plain model, whole in memory or without memory, into this rank's part of it, in place.

    Its calls, caches and logits are those of the whole model; every rank of a tp group makes the same calls.

    Raises:
        InputError: a size that cannot be divided, see `Plan.check`, or a model that is a rank's part already.
    """
    if hasattr(model, "share"):
        raise InputError(f"model: rank {model.share.rank}'s part already, expected a whole model")
    mesh.plan.check(model.config, [layer.mlp.experts.stored_format for layer in model.llm.layers])
    share = Share(model.config, mesh.plan, mesh.rank)
    for name, cut in share.slices().items():
        cut_parameter(model, name, cut)
    llm, current = model.llm, Pass(share, mesh.tp, mesh.dp)
    sends = mesh.plan.exchange == "all_to_all"
    for i, layer in enumerate(llm.layers):
        sizes = {"num_heads": share.n_local_heads(i), "num_key_value_heads": share.n_local_kv_heads(i)}
        layer.attn.sizes = replace(layer.attn.sizes, **sizes)
        layer.attn.register_forward_pre_hook(lambda _, inputs: _all_tokens(current, *inputs))
        layer.attn_sconv = ShardedConv(layer.attn_sconv, current)
        layer.mlp = ShardedMoE(layer.mlp, share, current, mesh.world)
        layer.mlp_sconv = ShardedConv(layer.mlp_sconv, current, takes_own_tokens=sends)
    llm.embed = ShardedEmbedding(llm.embed, share, mesh.tp)
    llm.logits = ShardedHead(llm, share, mesh.tp)
    llm.register_forward_pre_hook(lambda _, inputs: (current.enter(inputs[0]), *inputs[1:]))
    llm.register_forward_hook(lambda _, inputs, hidden: current.leave(hidden))
    local_text = share.local_text()
    model.new_cache = lambda batch_size=1, rollback=32: Cache(
        local_text, batch_size, model.dtype, model.device, rollback
    )
    model.ranks = lambda: Ranks(model)
    model.mesh, model.share, model.current = mesh, share, current
    return model


def _all_tokens(current: Pass, x_q: Tensor, x_k: Tensor, x_v: Tensor, *others: Any) -> tuple:
    if current.T is None:
        return (x_q, x_k, x_v, *others)
    if x_k is x_q:  # a sliding layer has one input
        return (*[current.all_tokens(x_q)] * 3, *others)
    return (*current.all_tokens(torch.cat([x_q, x_k, x_v], dim=-1)).chunk(3, dim=-1), *others)


def cut_parameter(model: nn.Module, name: str, cut: tuple[slice, ...]) -> None:
    """Leave of one parameter, or of packed experts, what is asked for."""
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    if leaf in module._parameters:
        parameter = module._parameters[leaf]
        part = parameter[cut].clone(memory_format=torch.contiguous_format)  # a view would keep the whole in memory
        module._parameters[leaf] = nn.Parameter(part, parameter.requires_grad)
        return
    if module._buffers[leaf].dtype == torch.int32:  # see `Backend.pack_experts`
        raise InputError(f"{name}: in the order of a kernel, expected parallel.apply.load to read a rank's slices")
    for suffix in ("", *COMPANIONS):  # packed experts
        buffer = module._buffers[leaf + suffix]
        if buffer is not None:
            module._buffers[leaf + suffix] = buffer[stored_slices(cut, suffix, module.stored_format)].clone()


class SlicedReader:
    """A checkpoint as one rank reads it: of every tensor its slices."""

    def __init__(self, reader: CheckpointReader, share: Share, formats: list[str]) -> None:
        self.reader, self.table, self.formats = reader, share.slices(), formats
        self.folder = reader.folder

    def __contains__(self, name: str) -> bool:
        return name in self.reader

    @property
    def bytes_read(self) -> int:
        return self.reader.bytes_read

    @property
    def nbytes(self) -> int:
        """Of all slices."""
        return sum(self._nbytes(name) for name in self.reader.names)

    def _nbytes(self, name: str) -> int:
        layout, cut = self.reader.layout(name), self._cut(name)
        whole = [slice(None)] * (len(layout.shape) - len(cut))
        sizes = [len(range(*s.indices(n))) for s, n in zip((*cut, *whole), layout.shape, strict=True)]
        return math.prod(sizes) * layout.dtype.itemsize

    def file(self, name: str) -> str:
        return self.reader.file(name)

    def read(self, name: str) -> Tensor:
        return self.reader.read_slice(name, self._cut(name))

    def _cut(self, name: str) -> tuple[slice, ...]:
        plain = name.removeprefix("model.")
        suffix = next((s for s in COMPANIONS if plain.endswith(s)), "")
        plain = plain.removesuffix(suffix)
        cut = self.table.get(plain, ())
        if ".mlp.experts." not in plain:
            return cut
        return stored_slices(cut, suffix, self.formats[int(plain.split(".")[2])])


def load(
    folder: str | Path,
    mesh: Mesh,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | Backend = "torch",
    experts: str | None = None,
) -> Inkling:
    """This rank's part of a checkpoint, of which it reads nothing else; arguments and errors as `inkling_ref.load`.

    `model.bytes_read` counts the bytes of tensors that were read.
    """
    config = InklingConfig.from_pretrained(folder)
    mesh.plan.check(config)
    model, storage = empty_model(config, device, dtype, backend, experts)
    with CheckpointReader(folder) as reader:
        formats = check(reader, model)
        mesh.plan.check(config, formats)
        parallelize(model, mesh)
        fill(model, SlicedReader(reader, model.share, formats), formats, storage)
        model.bytes_read = reader.bytes_read
    return model.requires_grad_(False).eval()
