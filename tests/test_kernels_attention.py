"""Contract of the attention kernels."""

import math
import re
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from helpers import relative_rms, unchecked
from kernel_contract import DEVICE, check, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)
from ptx import emulate, floats
from test_attention import operands

from inkling_ref import attention, fused
from inkling_ref.decode_step import captured
from inkling_ref.errors import InputError
from inkling_ref.kernels import INTERPRETED, arrivals, decode_hopper
from inkling_ref.kernels import attention as attention_kernel
from inkling_ref.kernels import decode as decode_kernel

pytestmark = needs_device


SMALL = {"H": 2, "G": 1}  # the interpreter takes 50 ms a program: 3 key/value heads only where they matter

# Below, at and above the tiles (16 and 64 rows; 64 and 128 keys), the window, the extent; sizes apart from powers of 2.
ATTENTION = {
    "prefill": ({"T": 13}, {"offsets": [0, 0]}),
    "prefill, several tiles": ({"T": 45, "G": 1, "d": 16, "X": 33}, {"offsets": [0, 0]}),
    "prefill, one query": ({"T": 1}, {"offsets": [0, 0]}),
    "prefill, one head a group": ({"T": 35, "H": 3}, {"offsets": [0, 0]}),
    "sliding": ({"T": 41}, {"offsets": [0, 0], "window": 9}),
    "sliding, window above T": ({"T": 7, "X": 19, **SMALL}, {"offsets": [0, 0], "window": 19}),
    "sliding, window of one": ({"T": 5, "X": 1, **SMALL}, {"offsets": [0, 0], "window": 1}),
    "window above extent": ({"T": 40, **SMALL}, {"offsets": [0, 0], "window": 12}),
    "window below extent": ({"T": 40, **SMALL}, {"offsets": [0, 0], "window": 5}),
    "chunk": ({"T": 37, "S": 120, **SMALL}, {"offsets": [83, 83]}),
    "chunk, sliding": ({"T": 37, "S": 60, **SMALL}, {"offsets": [23, 23], "window": 9}),
    "chunks of unequal rows": ({"T": 11, "S": 90}, {"offsets": [79, 30], "first_keys": [0, 3]}),
    "decode": ({"T": 1, "S": 301}, {"offsets": [300, 300]}),
    "decode, extent of a tile": ({"T": 1, "S": 257, "X": 128, **SMALL}, {"offsets": [256, 256]}),
    "decode, short": ({"T": 1, "S": 3, **SMALL}, {"offsets": [2, 2]}),
    "decode, unequal rows": ({"T": 1, "S": 301}, {"offsets": [300, 4], "first_keys": [7, 0]}),
    "decode, sliding": ({"T": 1, "S": 30, **SMALL}, {"offsets": [29, 20], "first_keys": [0, 18], "window": 9}),
    "decode, no bias reaches the first splits": ({"T": 1, "S": 530, "X": 3, **SMALL}, {"offsets": [529, 529]}),
    "verify 2": ({"T": 2, "S": 200, **SMALL}, {"offsets": [198, 198]}),
    "verify 8": ({"T": 8, "S": 261, "X": 70, **SMALL}, {"offsets": [253, 253]}),
    "verify 8, unequal rows": ({"T": 8, "S": 261, **SMALL}, {"offsets": [253, 0]}),
    "no key visible": ({"T": 3, "S": 20, **SMALL}, {"offsets": [17, 2], "first_keys": [0, 9]}),
    "released head": ({"T": 5, "H": 3, "G": 1, "d": 128, "R": 16, "S": 100, "X": 64}, {"offsets": [95, 95]}),
}


@dtypes
@pytest.mark.parametrize(("sizes", "arguments"), ATTENTION.values(), ids=ATTENTION)
def test_attend(sizes, arguments, dtype):
    check(attention_kernel.attend, attention.attend, operands(**sizes), dtype, **arguments)


def test_attend_packed_documents():
    ids = torch.tensor([[0] * 20 + [1] * 13 + [2] * 8, [0] * 41], device=DEVICE)
    tensors = operands(T=41)
    for window in (None, 9):
        arguments = {"offsets": [0, 0], "window": window, "document_ids": ids}
        check(attention_kernel.attend, attention.attend, tensors, torch.float32, **arguments)


def cache(tensors, lengths, window, page=None):
    """Tensors and arguments of `attend_cache` for `operands`, in pages of random order or none; dead slots hold NaN."""
    given, arguments = dict(tensors), {"window": window}
    T, S = given["q"].shape[1], given["k"].shape[2]
    slots, first = torch.arange(S), torch.tensor(lengths)[:, None]
    dead = (slots >= first + T) | (slots <= first - (window or S))
    for name, cached in (("k", "keys"), ("v", "values")):
        given[cached] = given.pop(name).masked_fill(dead[:, None, :, None], math.nan)
    arguments["lengths"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    if page is not None:
        B, pages = len(lengths), -(-S // page)
        table = torch.randperm(B * pages, generator=torch.Generator().manual_seed(1)).view(B, pages)
        for name in ("keys", "values"):
            rows = torch.nn.functional.pad(given[name], (0, 0, 0, pages * page - S), value=math.nan)
            given[name] = torch.empty(B * pages, *rows.shape[1:2], page, rows.shape[3], dtype=rows.dtype)
            given[name][table] = rows.unflatten(2, (pages, page)).transpose(1, 2)
        arguments["table"] = table.to(DEVICE, torch.int32)
    return given, arguments


CACHE = {  # sizes, lengths, window, slots of a page
    "one row": ({"B": 1, "T": 1, "S": 301}, [300], None, None),
    "one slot used": ({"T": 1, "S": 70, **SMALL}, [0, 69], None, None),
    "unequal rows": ({"B": 5, "T": 1, "S": 301, **SMALL}, [300, 17, 2, 133, 64], None, None),
    "unequal rows, sliding": ({"B": 3, "T": 2, "S": 150, **SMALL}, [148, 5, 70], 9, None),
    "pages": ({"B": 3, "T": 1, "S": 301}, [300, 63, 64], None, 64),
    "pages, a query on each side of an edge": ({"B": 3, "T": 4, "S": 260, **SMALL}, [126, 60, 256], None, 64),
    "pages, sliding": ({"B": 3, "T": 2, "S": 260, **SMALL}, [140, 61, 0], 9, 64),
    "pages, window above extent": ({"B": 2, "T": 1, "S": 260, **SMALL}, [259, 100], 70, 64),
    "pages of two steps": ({"B": 2, "T": 1, "S": 260, **SMALL}, [259, 130], None, 128),
    "rows not in use": ({"B": 4, "T": 3, "S": 100, **SMALL}, [-3, 97, -3, 20], None, 64),
    "no row in use": ({"B": 2, "T": 3, "S": 100, **SMALL}, [-3, -3], None, 64),
    "released head": ({"B": 2, "T": 5, "H": 3, "G": 1, "d": 128, "R": 16, "S": 300, "X": 64}, [295, 128], None, 64),
    "6 tokens": ({"T": 6, "S": 209, "X": 70, **SMALL}, [203, 40], None, 64),
    "7 tokens": ({"T": 7, "S": 209, "X": 70, **SMALL}, [202, 50], None, None),
    "8 tokens": ({"T": 8, "S": 209, "X": 70, **SMALL}, [201, 60], None, 64),
}


@dtypes
@pytest.mark.parametrize(("sizes", "lengths", "window", "page"), CACHE.values(), ids=CACHE)
def test_attend_cache(sizes, lengths, window, page, dtype):
    tensors, arguments = cache(operands(**sizes), lengths, window, page)
    check(decode_kernel.attend_cache, fused.attend_cache, tensors, dtype, **arguments)


CLUSTERS = {  # heads, key/value heads, extent; lengths, window, slots of a page: what `decode_hopper` takes
    "a rank's heads": ((6, 1, 1024), [2900, 1023, 1024, 300, 64, 0], 1024, 128),
    "two heads, small pages": ((10, 2, 1024), [1500, 127, 1022], 1024, 64),
    "no pages": ((8, 1, 700), [1200, 999, 5], 1000, None),
    "four blocks": ((6, 1, 512), [1999, 100, 511], 512, 128),
    "a short window": ((3, 1, 33), [400, 3], 33, 64),
    "rows not in use": ((6, 1, 1024), [-1, 1100, -1], 1024, 128),
    "no row in use": ((6, 1, 1024), [-1, -1], 1024, 128),
}


def for_a_cluster(heads, lengths, window, page):
    H, G, X = heads
    sizes = {"B": len(lengths), "T": 1, "H": H, "G": G, "d": 128, "R": 16, "X": X, "S": max(*lengths, 9) + 1}
    return cache(operands(**sizes), lengths, window, page)


needs_hopper = pytest.mark.skipif(
    INTERPRETED or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU: clusters, in Gluon"
)


@needs_hopper
@pytest.mark.parametrize("case", CLUSTERS.values(), ids=CLUSTERS)
def test_attend_cache_by_clusters(case, monkeypatch):
    monkeypatch.setattr(decode_kernel, "attend_split", None)  # which would be called instead
    tensors, arguments = for_a_cluster(*case)
    check(decode_kernel.attend_cache, fused.attend_cache, tensors, torch.bfloat16, **arguments)


def test_what_is_for_clusters(monkeypatch):
    """One token that sees a window, in what 32 bits reach: slots may be far apart where rows are not."""
    calls = []
    launch = {(6,): lambda *given, **sizes: calls.append(sizes["CTAS"])}
    for name, other in (("decode_cluster", launch), ("layouts", lambda *sizes: {}), ("capability_major", lambda _: 9)):
        monkeypatch.setattr(decode_kernel, name, other)
    shapes = {"q": (3, 1, 10, 128), "r": (3, 1, 10, 16), "profiles": (16, 33), "sink": (3, 1, 10), "gate": (3, 1, 1280)}
    given = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    lengths = torch.zeros(3, dtype=torch.int32)
    slots = torch.empty(2**22, 3, 2, 128, dtype=torch.bfloat16, device="meta")
    for count, window, expected in ((99, 512, 4), (99, 513, 8), (99, 1025, None), (99, None, None), (2**22, 9, None)):
        keys = slots[:count].permute(1, 2, 0, 3)
        y = decode_kernel._by_clusters(**given, k=keys, v=keys, lengths=lengths, window=window, table=None)
        assert calls == ([] if expected is None else [expected])
        assert y is None if expected is None else y.shape == (3, 1, 1280)
        calls.clear()


@pytest.mark.parametrize("blocks", [4, 8])
def test_exchange_of_a_cluster(blocks):
    """Every block gets its channels from all; a barrier must see as many bytes as it expects, or it never opens."""
    n, own, shape = 3 * blocks, 128 // blocks, (blocks, 8, 32)
    sums, ends = torch.randn(blocks, 8, 128, dtype=torch.float64), torch.randn(2, blocks, 8, dtype=torch.float64)
    block, warp, lane = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    given = {f"${n}": torch.zeros(shape, dtype=torch.long)}
    for k in range(4):
        given[f"${n + 1 + k}"] = sums[block, 2 * (lane % 4) + k // 2, 16 * warp + 2 * (lane // 4) + k % 2]
    given |= {f"${n + 5 + k}": ends[k][block, lane // 4] for k in range(2)}
    opened = decode_hopper.open_ptx(blocks)
    boxes = floats(blocks, int(re.search(r"box\[(\d+)\]", opened)[1]) // 4)
    after, sent = emulate(decode_hopper.exchange_ptx(blocks), blocks, 8, given, boxes)
    assert sent == blocks * int(re.search(r"expect_tx.*, (\d+);", opened)[1])
    assert boxes[:, :4].isnan().all()  # the barrier's own words
    for k in range(blocks):
        assert torch.equal(after[f"${k}"][..., :own], sums[k].unflatten(-1, (blocks, own)).transpose(0, 1))
        for i in range(2):
            assert torch.equal(after[f"${(i + 1) * blocks + k}"], ends[i, k][:, None].expand(shape))


@needs_hopper
def test_clusters_give_the_same_bits():
    """At any time, beside anything else: 64 rows in a graph, replayed on two streams."""
    tensors, arguments = for_a_cluster((6, 1, 1024), [1100 + 37 * b for b in range(64)], 1024, 128)
    given = {name: placed(t, torch.bfloat16) for name, t in tensors.items()} | arguments
    run = lambda: [decode_kernel.attend_cache(**given) for _ in range(7)]  # noqa: E731
    expected, streams = run()[0], [torch.cuda.Stream() for _ in range(2)]
    graphs = [captured(run) for _ in streams]
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, outputs in graphs:
        for y in outputs:
            assert torch.equal(y, expected)


@needs_hopper
def test_clusters_read_views(monkeypatch):
    """As a step gives them: parts of one projection, keys and values in one tensor; also of odd distances."""
    monkeypatch.setattr(decode_kernel, "attend_split", None)
    tensors, arguments = for_a_cluster((6, 1, 1024), [1200, 40, 700], 1024, 128)
    given = {name: placed(t, torch.bfloat16) for name, t in tensors.items()}
    expected = decode_kernel.attend_cache(**given, **arguments)
    for more in (8, 3):
        views = dict(given)
        for name in ("q", "r", "sink", "gate"):
            wide = torch.nn.functional.pad(given[name], (more, 5), value=math.nan)
            views[name] = wide[..., more:-5]
        views["keys"], views["values"] = torch.stack([given["keys"], given["values"]], dim=2).unbind(2)
        assert not views["keys"].is_contiguous()
        assert torch.equal(decode_kernel.attend_cache(**views, **arguments), expected)


@needs_hopper
@pytest.mark.parametrize("name", ["q", "r", "sink", "gate", "keys", "values"])
def test_clusters_pass_nan_on(name):
    """Where the reference has one, and nowhere else."""
    tensors, arguments = for_a_cluster((6, 1, 1024), [1200, 40], 1024, 128)
    given = {name: placed(t, torch.bfloat16) for name, t in tensors.items()}
    place = (0, 0, 2) if name not in ("keys", "values") else (int(arguments["table"][0, 1000 // 128]), 0, 1000 % 128)
    given[name][place] = math.nan
    y, expected = (op(**given, **arguments) for op in (decode_kernel.attend_cache, fused.attend_cache))
    assert expected.isnan().any()
    assert torch.equal(y.isnan(), expected.isnan())


def test_attend_cache_reads_strided_integers():
    tensors, arguments = cache(operands(B=3, T=2, S=150, **SMALL), [148, 5, 70], None, 64)
    for name in ("lengths", "table"):
        arguments[name] = torch.stack([arguments[name], torch.full_like(arguments[name], 9)], -1)[..., 0]
    check(decode_kernel.attend_cache, fused.attend_cache, tensors, torch.float32, **arguments)


def test_attend_cache_is_attend():
    tensors, lengths = operands(T=2, S=75), [73, 30]
    expected = attention.attend(**tensors, offsets=lengths, window=9)
    for page in (None, 64):
        given, arguments = cache(tensors, lengths, 9, page)
        arguments = {n: a.cpu() if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        torch.testing.assert_close(fused.attend_cache(**given, **arguments), expected)


TILES = {  # keys a step, programs, warps that own keys, weight of a near step, whether `_combine` adds up
    "2 programs a head": (16, 8, 1, 2, False), "one program a head": (16, 4, 1, 2, False),
    "some a head": (16, 17, 1, 3, True), "more programs than steps": (64, 41, 1, 1, False),
    "2 ways": (32, 31, 2, 2, False), "4 ways": (64, 13, 4, 1, True), "8 ways": (128, 29, 8, 3, False),
}  # fmt: skip


def tiled(tile, offsets, **given):
    lengths = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    return decode_kernel.attend_split(**given, lengths=lengths, tile=tile)


@pytest.mark.parametrize("window", [None, 9], ids=["full", "sliding"])
@pytest.mark.parametrize(("keys", "programs", "ways", "weight", "apart"), TILES.values(), ids=TILES)
def test_attend_split(keys, programs, ways, weight, apart, window):
    tile = decode_kernel.Tile(keys, programs, ways, 1, 1, ways, weight, apart)
    dtype = torch.float32 if ways == 1 else torch.float16  # as `choose_tile` would have it
    tensors, arguments = operands(T=3, S=291, X=40, H=4, G=2), {"offsets": [288, 50], "window": window}
    check(partial(tiled, tile), attention.attend, tensors, dtype, **arguments)


@pytest.mark.parametrize("window", [None, 30], ids=["full", "sliding"])
def test_last_program_adds_up(window, monkeypatch):
    """Heads of unequal numbers of splits: any order of arrival gives the same bits, and all counters are zero again."""
    counters = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(decode_kernel, "arrivals", lambda device, count: counters)
    tile = decode_kernel.Tile(16, 23, 1, 1, 1, 4, 1)
    monkeypatch.setattr(decode_kernel, "choose_tile", lambda *sizes: tile)
    tensors, arguments = cache(operands(B=3, T=1, S=131, H=4, G=2), [128, -1, 17], window)
    given = {name: placed(t, torch.float32) for name, t in tensors.items()}
    outputs = [decode_kernel.attend_cache(**given, **arguments)]
    if INTERPRETED:
        from triton.runtime.interpreter import interpreter_builder as builder

        at = builder.set_grid_idx
        backwards = lambda *place: at(*(n - 1 - i for n, i in zip(builder.grid_dim, place, strict=True)))  # noqa: E731
        monkeypatch.setattr(builder, "set_grid_idx", backwards)
    outputs.append(decode_kernel.attend_cache(**given, **arguments))
    assert not counters.any()
    assert torch.equal(*outputs)
    exact = fused.attend_cache(**{name: t.double() for name, t in given.items()}, **arguments)
    assert relative_rms(outputs[0], exact) < 2e-6


@pytest.mark.skipif(INTERPRETED, reason="a graph needs a GPU")
def test_graphs_count_apart():
    """Two graphs on two streams at one time, and calls beside them: each has counters of its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors, arguments = cache(operands(B=5, T=1, S=301), [300, 17, 2, 133, 64], None)
    given = {name: placed(t, torch.bfloat16) for name, t in tensors.items()} | arguments
    run = lambda: [decode_kernel.attend_cache(**given) for _ in range(7)]  # noqa: E731
    expected = run()[0]
    graphs, streams = [captured(run) for _ in range(2)], [torch.cuda.Stream() for _ in range(3)]
    for _ in range(20):
        for stream, (graph, _) in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            beside = run()
    torch.cuda.synchronize()
    for y in [*beside, *graphs[0][1], *graphs[1][1]]:
        assert torch.equal(y, expected)
    assert not arrivals(device, 1).any()


@triton.jit
def _splits(out_ptr, lengths_ptr, S, B: tl.constexpr, PROGRAMS: tl.constexpr, PADDED_B: tl.constexpr):
    _, _, chunk, splits, _ = decode_kernel._share(
        lengths_ptr, None, 0, 0, S, B, 2, 1, 0, 1024, 64, 0, 2, PROGRAMS, PADDED_B
    )
    b = tl.arange(0, PADDED_B)
    tl.store(out_ptr + b, splits, mask=b < B)
    tl.store(out_ptr + B, chunk)


EVEN = {"4 rows": ([32_000] * 4, 132), "32 rows": ([32_000] * 32, 264), "unequal": ([90_000, 70, 0, 5_000, -1], 132)}


@pytest.mark.parametrize(("lengths", "programs"), EVEN.values(), ids=EVEN)
def test_splits_are_even(lengths, programs):
    """The longest of the splits is hardly longer than an equal share for every program."""
    B = len(lengths)
    out = torch.zeros(B + 1, dtype=torch.int32, device=DEVICE)
    given = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    _splits[(1,)](out, given, 100_000, B=B, PROGRAMS=programs, PADDED_B=triton.next_power_of_2(B))
    *splits, chunk = out.tolist()
    steps = [-(-n // 64) + -(-min(n, 1024) // 64) if n > 0 else 1 for n in lengths]  # near ones count twice
    assert min(splits) > 0
    assert 2 * sum(splits) <= programs
    assert all(chunk * (n - 1) < s + 2 and s <= chunk * n + 2 for n, s in zip(splits, steps, strict=True))
    assert chunk <= 1.05 * 2 * sum(steps) / programs + 2


def test_attend_cache_names_what_it_cannot_do():
    given, arguments = cache(operands(T=2, S=75), [73, 30], None, 64)
    given = {name: placed(t, torch.float32) for name, t in given.items()} | arguments
    with pytest.raises(InputError, match=r"lengths in torch.int64, expected int32"):
        decode_kernel.attend_cache(**given | {"lengths": given["lengths"].long()})
    with pytest.raises(InputError, match="pages of 48 slots"):
        decode_kernel.attend_cache(**given | {name: given[name][:, :, :48] for name in ("keys", "values")})
    long = {name: torch.cat([given[name]] * 5, dim=1)[:, :9] for name in ("q", "r", "sink", "gate")}
    with pytest.raises(InputError, match="9 tokens"):
        decode_kernel.attend_cache(**given | long)


def test_attend_reads_no_dead_slot():
    # Slots before a row's first key and past its last hold NaN; in the reference they would spoil the sums (0 NaN).
    tensors = operands(T=2, S=140, **SMALL)
    offsets, first_keys = [138, 60], [0, 11]
    exact = attention.attend(**tensors, offsets=offsets, first_keys=first_keys)
    given = {name: placed(t, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        given[name][1, :, :11] = given[name][1, :, 62:] = math.nan
    actual = attention_kernel.attend(**given, offsets=offsets, first_keys=first_keys)
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_reads_views_of_a_cache():
    tensors = operands(T=2, S=50)
    exact = attention.attend(**tensors, offsets=[48, 48])
    given = {name: t.to(DEVICE, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        capacity = torch.full((2, 3, 77, 5), math.nan, device=DEVICE)
        capacity[:, :, :50] = given[name]
        given[name] = capacity[:, :, :50]
    actual = attention_kernel.attend(**given, offsets=[48, 48])
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_follows_a_changed_profile():
    # P is kept transposed; a step of training, or a load, must not leave the old one in use.
    tensors = {name: t.to(DEVICE, torch.float32) for name, t in operands(T=5, **SMALL).items()}
    attention_kernel.attend(**tensors, offsets=[0, 0])
    tensors["profiles"].mul_(-2)
    actual = attention_kernel.attend(**tensors, offsets=[0, 0])
    assert relative_rms(actual, attention.attend(**tensors, offsets=[0, 0])) < 2e-6


@pytest.mark.parametrize("T", [2, 40])
def test_refuses_heads_that_do_not_divide_and_empty_windows(T):
    tensors = {name: placed(t, torch.float32) for name, t in operands(T=T).items()}
    for window in (0, -1):
        with pytest.raises(InputError, match=f"a window of {window}, expected at least 1"):
            attention_kernel.attend(**tensors, offsets=[0, 0], window=window)
    tensors["k"] = tensors["k"].repeat(1, 2, 1, 1)[:, :5]
    with unchecked(), pytest.raises(InputError, match="query heads on 5 key/value heads, expected a multiple"):
        attention_kernel.attend(**tensors, offsets=[0, 0])


@pytest.mark.skipif(not INTERPRETED, reason="a GPU knows bfloat16")
def test_refuses_the_interpreters_bfloat16():
    tensors = {name: t.bfloat16() for name, t in operands(T=2).items()}
    with pytest.raises(InputError, match="bfloat16 in Triton's interpreter is wrong"):
        attention_kernel.attend(**tensors, offsets=[0, 0])
