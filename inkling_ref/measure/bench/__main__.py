"""One group of cases in this process: `python -m inkling_ref.measure.bench GROUP`, which `inkling-ref bench` starts.

It calls every arm once, to compile it, says that it is ready, waits for a line on stdin, and measures.
"""

import argparse
import contextlib
import gc
import json
import sys

import torch

from .attention import bench_batches, bench_decode
from .experts import bench_experts
from .flex import bench_flex_decode, bench_flex_prefill
from .harness import KINDS, Bench
from .head import bench_draft, bench_head
from .layer import bench_layer
from .moe import bench_router, bench_swiglu
from .prefill import bench_prefill
from .projections import bench_projections
from .qkv import bench_qkv
from .quantization import bench_quantization
from .residual import bench_residual
from .runner import imported
from .short_conv import bench_short_conv
from .step import bench_step

GROUPS = {  # the most important first: the last ones go without, where time is short
    "decode": bench_decode,
    "prefill": bench_prefill,
    "flex_prefill": bench_flex_prefill,
    "residual": bench_residual,
    "projections": bench_projections,
    "qkv": bench_qkv,
    "short_conv": bench_short_conv,
    "router": bench_router,
    "head": bench_head,
    "experts": bench_experts,
    "quantization": bench_quantization,
    "batches": bench_batches,
    "draft": bench_draft,
    "swiglu": bench_swiglu,
    "flex_decode": bench_flex_decode,
    "layer": bench_layer,  # whole layers and steps compile for long
    "step": bench_step,
}
WITHOUT_REFERENCE = {"layer", "step", "flex_prefill", "flex_decode"}  # no op that a peer could stand for


def main() -> None:
    """Run the group; every limit, row and note is one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--against", default=",".join(KINDS.values()))
    parser.add_argument("--peer", action="append", default=[])
    arguments = parser.parse_args()
    group, against = GROUPS[arguments.group], arguments.against.split(",")
    peers = {name: imported(name) for name in arguments.peer}
    with torch.inference_mode():
        with contextlib.suppress(Exception):  # what fails now will fail again, and be said then
            group(Bench(against, peers, prepare=True))
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps({"ready": arguments.group}), flush=True)
        sys.stdin.readline()
        torch.manual_seed(0)
        group(Bench(against, peers))


if __name__ == "__main__":
    main()
