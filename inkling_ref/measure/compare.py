r"""Two traces side by side: which section is the first to depart, and whether it is to blame.

Both are read name by name in data-flow order, one tensor of each in memory. Every token of a section has an error, as
`differences` measures it. A section adds its own rounding to the error that comes in with its inputs x, and may amplify
that:

$$ \mathrm{allowed}_t = \mathrm{floor} + \mathrm{gain} \cdot \max_x \, \mathrm{error}_t(x) $$

Floor and gain stand in `sections.TOLERANCES`, by kind of section and by dtype; the maximum runs over earlier tokens too
where a convolution or an attention reads them. So a section

- *agrees*: no token's error is beyond floor;
- has *carried* an error through: some are, within what is allowed; its input was already wrong;
- *departs*: some are beyond what is allowed. The first to do so in data-flow order is the verdict: it adds an error
  that its inputs do not explain.

Choices of experts are sets. A set that differs is explained where the scores at the cut lie closer together than their
allowed error; what follows from another choice counts as input that is wrong, for that token and those that see it.

In 16 bits the noise grows with depth and hides small faults. Replaying takes it away: the reference computes each
section from the inputs that the *other* trace recorded, so that the result and what the other recorded differ by that
section's own error alone, and only floor is allowed. What is left below it, rounding, has no preferred sign; an error
whose mean depends on the value (another GELU, say) is told apart by `systematic`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint import load
from ..errors import InputError
from ..quantization import dtype_name
from ..tensor_files import CheckpointReader, Layout
from .differences import difference, differing_sets, first_bad, looks_like, systematic
from .replay import replay
from .sections import TOLERANCES, Section, inputs_of, order, parse
from .trace import Trace, chooser, read_manifest

SYSTEMATIC = 3e-5  # allowed by `systematic`, in 16 bits; finer dtypes see more in their floors

Status = Literal["agrees", "carried", "departs"]
Replay = Callable[[str], Tensor]  # name of a section -> what the reference makes of the other's recorded inputs


# --- What is read --------------------------------------------------------------------------------------------------


class Recorded:
    """The tensors of a trace, from a file or in memory, read one by one. A context manager."""

    def __init__(self, source: "str | Path | Trace | Mapping[str, Tensor]") -> None:
        self._reader = self._tensors = None
        if isinstance(source, (str, Path)):
            self.manifest = read_manifest(source)
            self._reader = CheckpointReader(Path(source).parent, file=Path(source).name)
            self.names = set(self._reader.names)
        else:
            self.manifest = source.manifest if isinstance(source, Trace) else {}
            self._tensors = source.tensors if isinstance(source, Trace) else source
            self.names = set(self._tensors)

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.__exit__()

    def layout(self, name: str) -> Layout:
        if self._reader is not None:
            return self._reader.layout(name)
        return Layout(self._tensors[name].dtype, tuple(self._tensors[name].shape))

    def read(self, name: str, token: int | None = None) -> Tensor:
        """The tensor, or [B, 1, ...] of it."""
        at = () if token is None else (slice(None), slice(token, token + 1))
        x = self._tensors[name][at] if self._reader is None else self._reader.read_slice(name, at)
        return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x  # 8 bits have no arithmetic


class _InSteps(Recorded):
    """A longer prompt's pass, read as that of a shorter prompt and one-token steps after it."""

    def __init__(self, whole: Recorded, prompt: list[list[int]], steps: int) -> None:
        self.whole, self.lengths = whole, [len(row) for row in prompt]
        cut = [row[len(start) :] for row, start in zip(whole.manifest["prompt"], prompt, strict=True)]
        self.manifest = {**whole.manifest, "prompt": prompt, "decoded": [row[:steps] for row in cut]}
        text = {name for name in whole.names if parse(name).section.shape.startswith("B T")}
        self.names = whole.names | {f"step.{n}.{name}" for n in range(1, steps + 1) for name in text}

    def __exit__(self, *_: object) -> None:
        self.whole.__exit__()

    def _tokens(self, name: str) -> tuple[str, int, int | None]:
        """The recorded name, tokens of this step, and S where the section has keys."""
        step, section, _ = parse(name)
        T, keys = (1 if step else max(self.lengths)), max(self.lengths) + step
        return name.removeprefix(f"step.{step}."), T, keys if section.shape.endswith(" S") else None

    def layout(self, name: str) -> Layout:
        bare, T, keys = self._tokens(name)
        whole = self.whole.layout(bare)
        if not parse(name).section.shape.startswith("B T"):
            return whole
        rest = whole.shape[2:] if keys is None else (*whole.shape[2:-1], keys)
        return Layout(whole.dtype, (whole.shape[0], T, *rest))

    def read(self, name: str, token: int | None = None) -> Tensor:
        bare, T, keys = self._tokens(name)
        step = parse(name).step
        if not parse(name).section.shape.startswith("B T"):
            return self.whole.read(bare)
        if step:
            rows = [self.whole.read(bare, n + step - 1)[i] for i, n in enumerate(self.lengths)]
            x = torch.stack(rows)
        else:
            x = self.whole.read(bare)[:, :T].clone()
            for row, n in zip(x, self.lengths, strict=True):
                row[n:] = 0
        return x if keys is None else x[..., :keys]


# --- The comparison ------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One section of both traces.

    Attributes:
        relative_rms, max_abs, cosine: over the whole tensor; for choices the share of tokens whose sets differ.
        error, allowed: of the token that goes furthest beyond what is allowed (or stays least below it).
        floor: what is allowed without any error of the inputs.
        inputs: recorded inputs and the worst error of a token in each.
        first_bad: index, the reference's number and the other's, unless it agrees.
        own: with replay, the worst error of a token against the reference on the other's own inputs.
        same_order: for choices whose ranking is recorded, the share of tokens whose k best come in the same order.
        note: what else there is to say: shapes, dtypes, NaN.
    """

    name: str
    status: Status
    relative_rms: float
    max_abs: float
    cosine: float
    error: float
    floor: float
    allowed: float
    inputs: dict[str, float] = field(default_factory=dict)
    first_bad: tuple[tuple[int, ...], float, float] | None = None
    own: float | None = None
    same_order: float | None = None
    note: str = ""

    @property
    def section(self) -> Section:
        return parse(self.name).section


@dataclass
class Comparison:
    """What `compare` found.

    Attributes:
        rows: every section that both have, in data-flow order.
        first: the first that departs, or None.
        between: sections of the reference that lie between `first` and its recorded inputs and that the other lacks:
            the fault is in one of them or in `first` itself.
        hints: what the wrong numbers look like: a factor, an order, a shift; and where they are.
        missing, extra: names that only the reference has; that only the other has, or that are no sections.
        notes: differences of the manifests.
        dtype: whose tolerances were used.
    """

    reference: dict[str, Any]
    other: dict[str, Any]
    dtype: str
    rows: list[Row]
    first: Row | None
    between: list[str]
    hints: list[str]
    missing: list[str]
    extra: list[str]
    notes: list[str]

    @property
    def exit_status(self) -> int:
        return 0 if self.first is None else 1


@torch.no_grad()
def compare(
    reference: "str | Path | Trace | Mapping[str, Tensor]",
    other: "str | Path | Trace | Mapping[str, Tensor]",
    replayed: Replay | None = None,
    sections: Sequence[str] | None = None,
    dtype: str | None = None,
) -> Comparison:
    """Compare two traces, each a file, a `Trace`, or tensors by name.

    Args:
        replayed: gives what the reference makes of the other's recorded inputs: `functools.partial(replay, model,
            other)`. Sections for which it raises InputError are compared as they were recorded, which is noted.
        sections: judge (and replay) these alone, patterns as `trace` takes them; None: all.
        dtype: whose tolerances to use; None: the coarser of both manifests' and of the tensors'.

    Raises:
        InputError: nothing can be compared: no section in common, other prompts, pictures or positions, inputs that
            cannot be replayed with these weights.
    """
    with ExitStack() as stack:
        a, b = (stack.enter_context(Recorded(source)) for source in (reference, other))
        known = {name for name in b.names if _is_section(name)}
        a, notes = _aligned(a, b)
        dtype = dtype or _coarser(a, b)
        if dtype not in _KINDS_OF_FLOAT:
            raise InputError(f"dtype {dtype!r}: expected one of {', '.join(_KINDS_OF_FLOAT)}")
        common = sorted(a.names & known, key=order)
        if not common:
            some = ", ".join(sorted(b.names)[:3]) or "nothing"
            raise InputError(f"compare: no section in common (the port has {some}), expected names as in sections.py")
        wanted = chooser(["all"] if sections is None else sections)
        judged = {name for name in common if wanted(name.removeprefix(f"step.{parse(name).step}."))}
        if not judged:
            raise InputError(f"compare: both traces lack {', '.join(sections)}, expected sections that both have")
        walk = _Walk(a, b, set(common), judged, dtype, replayed)
        # All of them: what errors the inputs bring is known from the sections before only.
        rows = [row for name in common if (row := walk.row(name)).name in judged]
        if (failed := walk.not_replayed) and all(row.own is None for row in rows):
            raise InputError(f"compare: nothing could be replayed, for example: {failed[0]}")
        if failed:
            notes.append(f"{len(failed)} sections not replayed but compared as recorded, for example: {failed[0]}")
        first = next((row for row in rows if row.status == "departs"), None)
        between, hints = [], []
        if first is not None:
            between = [name for name in walk.inputs(first.name)[1] if name in a.names]
            hints = walk.hints(first)
        extra = sorted(b.names - a.names)
        return Comparison(
            a.manifest,
            b.manifest,
            dtype,
            rows,
            first,
            between,
            hints,
            sorted(a.names - b.names, key=order),
            extra,
            notes,
        )


def replayer(checkpoint: str | Path, other: str | Path | Trace) -> Replay:
    """`replayed` for `compare`: with a checkpoint's weights, in the other trace's dtype."""
    recorded = other if isinstance(other, Trace) else Trace.read(other)
    model = load(checkpoint, dtype=getattr(torch, recorded.manifest.get("dtype") or "float32"))
    return partial(replay, model, recorded)


_SIXTEEN_BITS = ("float16", "bfloat16")
_KINDS_OF_FLOAT = ("float64", "float32", "float16", "bfloat16")  # finest first


def _is_section(name: str) -> bool:
    try:
        parse(name)
    except InputError:
        return False
    return True


def _coarser(a: Recorded, b: Recorded) -> str:
    """Of the manifests' dtypes; where one has none, of its coarsest tensor."""
    found = []
    for side in (a, b):
        kinds = {dtype_name(side.layout(name).dtype) for name in side.names}
        stated = side.manifest.get("dtype")
        found += [stated] if stated else [kind for kind in kinds if kind in _KINDS_OF_FLOAT]
    return max(
        found, key=lambda kind: _KINDS_OF_FLOAT.index(kind) if kind in _KINDS_OF_FLOAT else -1, default="float32"
    )


def _aligned(a: Recorded, b: Recorded) -> tuple[Recorded, list[str]]:
    """The reference, in the other's steps, and what differs in the manifests.

    Raises:
        InputError: if they describe runs on other inputs.
    """
    notes: list[str] = []
    x, y = a.manifest, b.manifest
    if not y:
        return a, ["the port's trace has no manifest: its prompt and config are not checked"]
    if x.get("prompt") and y.get("prompt") and x["prompt"] != y["prompt"]:
        steps = {len(row) for row in y["decoded"]}
        continued = [row + more for row, more in zip(y["prompt"], y["decoded"], strict=True)]
        if len(steps) != 1 or not any(steps) or x["prompt"] != continued or any(x["decoded"]):
            raise InputError(f"compare: other prompts: {_first_difference(x['prompt'], y['prompt'])}")
        notes.append("one pass beside a prompt and decoding steps: compared token by token")
        a = _InSteps(a, y["prompt"], steps.pop())
    elif x.get("decoded") and y.get("decoded") and x["decoded"] != y["decoded"]:
        raise InputError(f"compare: other decoded tokens: {_first_difference(x['decoded'], y['decoded'])}")
    for key in ("images", "positions"):
        if key in x and key in y and x[key] != y[key]:
            raise InputError(f"compare: other {key}: {x[key]} and {y[key]}")
    notes += [
        f"config: {key} is {left!r}, the port's {right!r}"
        for key, left, right in _differences(x.get("config"), y.get("config"))
    ]
    notes += [
        f"{key}: {x[key]}, the port's {y[key]}" for key in ("dtype",) if x.get(key) and y.get(key) and x[key] != y[key]
    ]
    return a, notes


def _first_difference(x: list[list[int]], y: list[list[int]]) -> str:
    if [*map(len, x)] != [*map(len, y)]:
        return f"rows of {[*map(len, x)]} and of {[*map(len, y)]} tokens"
    r, t = next((r, t) for r, row in enumerate(x) for t, token in enumerate(row) if token != y[r][t])
    return f"row {r}, token {t} is {x[r][t]} and {y[r][t]}"


def _differences(x: Any, y: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(x, dict) and isinstance(y, dict):
        return [d for k in sorted(x.keys() & y.keys()) for d in _differences(x[k], y[k], f"{key}.{k}" if key else k)]
    return [] if x == y or y is None else [(key, x, y)]


class _Walk:
    """The sections in data-flow order, with the token errors of those before."""

    def __init__(
        self, a: Recorded, b: Recorded, common: set[str], judged: set[str], dtype: str, replay: Replay | None
    ) -> None:
        self.a, self.b, self.common, self.judged, self.dtype, self.replay = a, b, common, judged, dtype, replay
        self.errors: dict[str, Tensor] = {}
        self.not_replayed: list[str] = []  # why
        self.ranked: dict[tuple[int, int | None], tuple[Tensor, Tensor]] = {}  # biased scores, of step and layer

    def inputs(self, name: str) -> tuple[list[str], list[str]]:
        return inputs_of(name, self.a.names, self.common)

    def incoming(self, name: str, names: list[str], hidden: list[str], shape: tuple[int, ...]) -> Tensor:
        """The largest error of the inputs that each token reads."""
        worst = torch.zeros(shape, dtype=torch.float64)
        step = parse(name).step
        patterns = [pattern for n in (name, *hidden) for pattern in parse(n).section.inputs]
        reads_past = any(pattern.startswith("..") for pattern in patterns)
        for other in names:
            e = self.errors.get(other)
            if e is None:  # not to be compared
                continue
            if parse(other).step != step and e.dim() == 2 == len(shape):
                e = e.amax(dim=1, keepdim=True)
            elif len(shape) != 2 or e.shape != shape:
                e = e.max() if e.numel() else e.new_zeros(())
            elif reads_past:
                e = e.cummax(dim=1).values
            worst = torch.maximum(worst, e)
        return worst

    def limits(self, section: Section, hidden: list[str]) -> tuple[float, float]:
        """Floor and gain of a section and of what lies hidden before it.

        What is recorded on request only does not add: its neighbours' floors were measured without it.
        """
        others = [parse(name).section for name in hidden]
        rows = [TOLERANCES[other.tolerance] for other in others if not other.on_request]
        own = TOLERANCES[section.tolerance]
        floor = own[self.dtype] + math.sqrt(sum(row[self.dtype] ** 2 for row in rows))
        return floor, max(row["gain"] for row in [own, *rows])

    def replayed(self, name: str) -> Tensor | None:
        """What the reference makes of the other's inputs; None where they are not recorded, or do not fit."""
        if self.replay is None or name not in self.judged or not parse(name).section.inputs:
            return None
        try:
            own = self.replay(name).cpu()
        except InputError as error:
            self.not_replayed.append(str(error))
            return None
        if own.shape != (shape := self.b.layout(name).shape):
            self.not_replayed.append(f"replay of {name}: {list(own.shape)} with these weights, recorded {list(shape)}")
            return None
        return own

    def row(self, name: str) -> Row:
        step, section, layer = parse(name)
        la, lb = self.a.layout(name), self.b.layout(name)
        axes = 2 if section.shape.startswith("B T") else 1
        names, hidden = self.inputs(name)
        floor, gain = self.limits(section, hidden)
        incoming = self.incoming(name, names, hidden, la.shape[:axes])
        allowed = floor + gain * incoming
        inputs = {n: float(e.max()) if e.numel() else 0.0 for n in names if (e := self.errors.get(n)) is not None}
        same_dtype = self.a.manifest.get("dtype") == self.b.manifest.get("dtype", self.a.manifest.get("dtype"))
        note = (
            f"{dtype_name(lb.dtype)} here, {dtype_name(la.dtype)} in the reference"
            if same_dtype and la.dtype != lb.dtype
            else ""
        )
        if la.shape != lb.shape:
            self.errors[name] = torch.full(la.shape[:axes], math.inf, dtype=torch.float64)
            note = f"shape {list(lb.shape)}, expected {list(la.shape)} = [{section.shape}]"
            return Row(name, "departs", math.inf, math.inf, math.nan, math.inf, floor, floor, inputs, note=note)
        a, b = self.a.read(name), self.b.read(name)
        own = self.replayed(name)
        if section.kind == "choices":
            return self._choices(name, a, b, own, allowed, floor, inputs, note)
        if section.name.endswith(".biased"):
            self.ranked[step, layer] = (a, b) if own is None else (own, b)
        d = difference(a, b, axes)
        errors, judged, limit = d.tokens, d.tokens, allowed
        worst_own, bias = None, 0.0
        if own is not None:
            judged = difference(own, b, axes).tokens
            worst_own, limit = float(judged.max()), torch.full_like(allowed, floor)
            if self.dtype in _SIXTEEN_BITS and section.tolerance != "attention":
                bias = systematic(own, b)
        self.errors[name] = errors
        if (bad := int((~b.isfinite()).sum()) - int((~a.isfinite()).sum())) > 0:
            note = f"{bad} of {b.numel()} numbers are NaN or infinite"
        excess = (errors / allowed).nan_to_num(nan=1.0)
        t = int(excess.argmax()) if excess.numel() else None
        beyond = judged > limit
        # Where the choice of experts is not recorded, a near tie may have turned any token: half of them must be off.
        blind = own is None and any(name.endswith(".chosen") for name in hidden) and self.dtype in _SIXTEEN_BITS
        departs = bool(beyond.double().mean() > 0.5) if blind else bool(beyond.any()) or bias > SYSTEMATIC
        if bias > SYSTEMATIC and not beyond.any():
            note = f"within rounding, but the error follows the value: {bias:.1e} of it is systematic"
        status = "departs" if departs else "carried" if bool((errors > floor).any()) else "agrees"
        row = Row(
            name, status, d.relative_rms, d.max_abs, d.cosine,
            0.0 if t is None else float(errors.flatten()[t]), floor,
            floor if t is None else float(allowed.flatten()[t]), inputs, own=worst_own, note=note,
        )  # fmt: skip
        if status != "agrees":
            expected = own if departs and own is not None else a
            index = first_bad(expected, b, judged if departs else errors, floor)
            row.first_bad = index, float(expected[index]), float(b[index])
        return row

    def _choices(
        self, name: str, a: Tensor, b: Tensor, own: Tensor | None, allowed: Tensor, floor: float,
        inputs: dict[str, float], note: str,
    ) -> Row:  # fmt: skip
        """A set that differs is explained by scores at the cut that lie within both their allowed errors."""
        step, _, layer = parse(name)
        ranked = self.ranked.get((step, layer))
        wrong, gap = differing_sets(a, b, None if ranked is None else ranked[0])
        # Where the ranking was not recorded, inputs that are off explain everything.
        gap = torch.where(gap.isinf() & (allowed > 2 * floor), 0, gap)
        departs, worst_own = wrong & (gap > 2 * allowed), None
        if own is not None:
            other, gap = differing_sets(own, b, None if ranked is None else ranked[1])
            departs, worst_own = other & (gap > 2 * floor), float(other.any())
        self.errors[name] = wrong.double()
        status = "departs" if departs.any() else "carried" if wrong.any() else "agrees"
        share = float(wrong.double().mean())
        row = Row(
            name, status, share, math.nan, math.nan, float(wrong.any()), 0.0, 0.0, inputs, own=worst_own, note=note
        )
        if ranked is not None:
            k = a.shape[-1]
            x, y = (s.double().sort(dim=-1, descending=True, stable=True).indices[..., :k] for s in ranked)
            row.same_order = float((x == y).all(dim=-1).double().mean())
        if status != "agrees":
            at = tuple(int(i) for i in (departs if departs.any() else wrong).nonzero()[0])
            expected = own if own is not None and departs.any() else a
            place = int((expected[at] != b[at]).to(torch.int8).argmax())
            row.first_bad = (*at, place), float(expected[at][place]), float(b[at][place])
        return row

    def hints(self, row: Row) -> list[str]:
        """Where the numbers of a section that departs are wrong, and what they look like."""
        if row.section.kind == "choices" or self.a.layout(row.name).shape != self.b.layout(row.name).shape:
            return []
        a, b = self.a.read(row.name), self.b.read(row.name)
        own = self.replayed(row.name)
        return looks_like(a if own is None else own, b, row.section.shape.split(), row.allowed)
