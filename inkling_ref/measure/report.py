"""A comparison as a terminal shows it, as JSON, and as one HTML page with plots that loads nothing from elsewhere."""

import html
import json
import math
import re
from dataclasses import asdict
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .compare import Comparison, Row
from .sections import equations, parse, source

COLOURS = {"agrees": "green", "carried": "yellow", "departs": "red"}


# --- Words ---------------------------------------------------------------------------------------------------------


def describe(manifest: dict[str, Any]) -> str:
    """One line about what was traced."""
    if not manifest:
        return "tensors without a manifest"
    prompt, decoded, images = (manifest.get(key) or [] for key in ("prompt", "decoded", "images"))
    parts = [str(manifest.get("implementation", "unknown")), str(manifest.get("dtype", "")), manifest.get("device", "")]
    tokens, steps = sum(map(len, prompt)), max(map(len, decoded), default=0)
    parts += [f"{tokens} tokens in {len(prompt)} row{'s' * (len(prompt) > 1)}"] if prompt else []
    parts += [f"{steps} decoding step{'s' * (steps > 1)}"] if steps else []
    parts += [f"{len(images)} picture{'s' * (len(images) > 1)}"] if images else []
    return ", ".join(part for part in parts if part)


def headline(c: Comparison) -> str:
    """The verdict in one line."""
    if c.first is None:
        return f"agrees: {len(c.rows)} sections within the tolerances of {c.dtype}"
    return f"departs at {c.first.name}"


def blame(c: Comparison) -> str:
    """Whether the first section that departs is wrong itself."""
    first = c.first
    if first is None:
        return ""
    if first.own is not None:
        found = f"error {number(first.own)}, allowed {number(first.floor)}"
        if first.own <= first.floor:
            found = "below one rounding, but not at random"
        return f"This section is wrong: from the port's own inputs the reference makes other numbers ({found})."
    if c.between:
        more = f"{len(c.between) - 6} more, " if len(c.between) > 6 else ""
        return (
            "The fault lies here, or in what comes before and the port did not record: "
            f"{more}{', '.join(c.between[-6:])}. Record these to tell."
        )
    if not first.inputs:
        return "Nothing that is recorded comes before it: the port was given something else, or prepares it otherwise."
    worst = max(first.inputs, key=first.inputs.get)
    return (
        f"This section is wrong: what it reads agrees (worst: {worst}, error {number(first.inputs[worst])}), "
        f"what it gives does not{_times(first)}."
    )


def _times(row: Row) -> str:
    if not math.isfinite(row.error) or not row.allowed:
        return ""
    return f" (error {number(row.error)}, allowed {number(row.allowed)})"


def number(x: float | None) -> str:
    """Two digits."""
    if x is None or math.isnan(x):
        return ""
    return "0" if x == 0 else f"{x:.2g}" if 1e-3 <= abs(x) < 1e4 else f"{x:.1e}"


def place(row: Row) -> str:
    """The first bad number: index, the reference's, the port's."""
    if row.first_bad is None:
        return ""
    index, left, right = row.first_bad
    at = f"[{', '.join(map(str, index))}] of [{row.section.shape}]"
    return f"{at}: {left:.6g} in the reference, {right:.6g} in the port"


_SYMBOLS = {
    r"\odot": "⊙", r"\cdot": "·", r"\sigma": "σ", r"\gamma": "γ", r"\alpha": "α", r"\epsilon": "ε", r"\omega": "ω",
    r"\theta": "θ", r"\phi": "φ", r"\tau": "τ", r"\sum": "Σ", r"\le": "≤", r"\leftarrow": "←", r"\mapsto": "↦",
    r"\lVert": "‖", r"\rVert": "‖", r"\min": "min", r"\max": "max", r"\log": "log", r"\tanh": "tanh", r"\sin": "sin",
    r"\cos": "cos", r"\times": "×", r"\quad": "  ", r"\qquad": "  ", r"\big": "", r"\Big": "",
    r"\lfloor": "⌊", r"\rfloor": "⌋", r"\;": " ", r"\,": " ", r"\textstyle": "", r"\text": "", r"\mathrm": "",
    r"\left": "", r"\right": "",
}  # fmt: skip


def plain(latex: str) -> str:
    """An equation for a terminal: LaTeX's commands as characters."""
    text = re.sub(r"\\(?:mathrm|text)\{([^{}]*)\}", r"\1", latex)  # first: no braces within those of a root
    text = re.sub(r"\\sqrt\{([^{}]*)\}", r"√(\1)", text).replace(r"\sqrt", "√")
    text = re.sub(r"\\hat (\w)", "\\1\N{COMBINING CIRCUMFLEX ACCENT}", text)
    for command in sorted(_SYMBOLS, key=len, reverse=True):
        text = text.replace(command, _SYMBOLS[command])
    text = re.sub(r"([_^])\{([^{}]{1,2})\}", r"\1\2", text)
    text = re.sub(r"([_^])\{([^{}]*)\}", r"\1(\2)", text).replace("{", "").replace("}", "").replace("\\", "")
    return " ".join(text.split())


# --- Terminal ------------------------------------------------------------------------------------------------------


def show(c: Comparison, everything: bool = False, console: Console | None = None) -> None:
    """Verdict first, then what matters to it, then counts; with `everything` every section."""
    console = console or Console(highlight=False, soft_wrap=False)
    print_ = partial(console.print, markup=False, highlight=False)
    print_(Text(headline(c), style=f"bold {'green' if c.first is None else 'red'}"))
    if c.first is not None:
        print_(Text(c.first.section.computes, style="italic"))
        print_("")
        print_(blame(c))
        print_("")
        print_(_facts_table(c))
    for note in c.notes:
        print_(Text(note, style="yellow"))
    print_("")
    rows = c.rows if everything else _what_matters(c)
    print_(_table(c, rows))
    print_("")
    print_(counts(c) + ("" if everything or len(rows) == len(c.rows) else "; --all shows all"), style="dim")
    for line in [f"reference: {describe(c.reference)}", f"port: {describe(c.other)}", *absent(c)]:
        print_(line, style="dim")


def _facts(c: Comparison) -> list[tuple[str, str]]:
    """Of the first section that departs: equations, source, what the wrong numbers look like, and where they begin."""
    first, where = c.first, source(c.first.section)
    found = [("equation", plain(latex)) for latex in equations(first.section)]
    found.append(("reference", f"{where.file}:{where.line}, {where.function}\n{where.text}"))
    found += [("looks like", hint) for hint in c.hints]
    if first.same_order is not None:
        same, ranked = (f"{100 * share:.3g} %" for share in (1 - first.relative_rms, first.same_order))
        found.append(("choices", f"{same} of the tokens have the same set, {ranked} the same ranking"))
    return found + [(name, text) for name, text in (("note", first.note), ("first bad", place(first))) if text]


def _facts_table(c: Comparison) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    before = ""
    for name, text in _facts(c):
        table.add_row("" if name == before else name, Text(text))
        before = name
    return table


def _what_matters(c: Comparison) -> list[Row]:
    """Inputs of the first that departs, itself, and what departs after it; of traces that agree, the closest calls."""
    if c.first is None:
        return sorted(c.rows, key=lambda row: row.error / row.allowed if row.allowed else 0.0, reverse=True)[:5]
    others = [row for row in c.rows if row.status == "departs" and row is not c.first]
    return [row for row in c.rows if row.name in c.first.inputs or row is c.first] + others[:5]


def _table(c: Comparison, rows: list[Row]) -> Table:
    replayed = any(row.own is not None for row in c.rows)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("section", overflow="fold", min_width=20)
    for heading in ("error", "allowed", *(["own"] if replayed else []), "rms", "cosine"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        status = Text(row.status, style=COLOURS[row.status] + (" bold" if row is c.first else ""))
        if row.section.kind == "choices":
            sets = (f"{100 * (1 - row.relative_rms):.4g} %", "of sets") if math.isfinite(row.relative_rms) else ("", "")
            cells = [*sets, *([""] if replayed else []), "", ""]
        else:
            own = [number(row.own)] if replayed else []
            cosine = "" if math.isnan(row.cosine) else f"{row.cosine:.5f}"
            error = "shape" if row.note.startswith("shape") else number(row.error)
            cells = [error, number(row.allowed), *own, number(row.relative_rms), cosine]
        table.add_row(Text(row.name), *cells, status)
    return table


def counts(c: Comparison) -> str:
    """How many sections agree, carry an error on, depart."""
    numbers = {status: sum(row.status == status for row in c.rows) for status in _WORDS}
    return f"{len(c.rows)} sections: " + ", ".join(f"{n} {_WORDS[status]}" for status, n in numbers.items() if n)


_WORDS = {"agrees": "agree", "carried": "carry on an error of their inputs", "departs": "depart"}


def absent(c: Comparison) -> list[str]:
    """Names that only one trace has."""
    lines = []
    for label, names in (("only in the reference", c.missing), ("only in the port", c.extra)):
        if names:
            lines.append(f"{label}: {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else ""))
    return lines


# --- JSON ----------------------------------------------------------------------------------------------------------


def to_json(c: Comparison) -> str:
    """Everything, for machines; infinite and missing numbers are null."""
    data = {
        "verdict": headline(c), "exit_status": c.exit_status, "dtype": c.dtype, "first": None, "between": c.between,
        "hints": c.hints, "notes": c.notes, "missing": c.missing, "extra": c.extra,
        "reference": c.reference, "port": c.other, "sections": [asdict(row) for row in c.rows],
    }  # fmt: skip
    if c.first is not None:
        where = source(c.first.section)
        data["first"] = {
            "name": c.first.name, "computes": c.first.section.computes, "blame": blame(c),
            "equations": equations(c.first.section), "source": f"{where.file}:{where.line}", "line": where.text,
        }  # fmt: skip
    return json.dumps(_finite(data), indent=1)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


# --- HTML ----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { --text: #1b1f24; --back: #fff; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --agrees: #1a7f37; --carried: #9a6700; --departs: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --soft: #8d96a0; --line: #30363d;
  --card: #161b22; --agrees: #3fb950; --carried: #d29922; --departs: #f85149; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1080px;
  margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
h1.agrees, .agrees { color: var(--agrees); } h1.departs, .departs { color: var(--departs); }
.carried { color: var(--carried); } .soft { color: var(--soft); font-size: .92em; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .5em 1.2em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2em 1.2em; } dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line; }
code, dd.code, td.name { font: 13px/1.4 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15em .6em; border-bottom: 1px solid var(--line); }
th:first-child, td.name { text-align: left; } td:last-child { text-align: left; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { text-align: center; }
summary { cursor: pointer; padding: .3em 0; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg .grid { stroke: var(--line); }
svg .dot.agrees { fill: var(--agrees); } svg .dot.carried { fill: var(--carried); }
svg .dot.departs { fill: var(--departs); } svg .allowed { fill: none; stroke: var(--soft); stroke-dasharray: 3 3; }
svg .first { fill: none; stroke: var(--departs); stroke-width: 2; }
"""
_CODE = ("equation", "reference")  # facts in a typewriter face
_LINES = ("layer.{i}.out", "layer.{i}.attention.gated", "moe.{i}.out", "vision.{i}.out")  # followed through the layers


def to_html(c: Comparison) -> str:
    """One page: the verdict, errors through the model, errors by layer, and every section."""
    e = html.escape
    parts = [f'<h1 class="{"agrees" if c.first is None else "departs"}">{e(headline(c))}</h1>']
    if c.first is not None:
        facts = [("computes", c.first.section.computes), *_facts(c)]
        listed = "".join(f"<dt>{name}</dt><dd{' class=code' * (name in _CODE)}>{e(text)}</dd>" for name, text in facts)
        parts.append(f'<div class="card"><p>{e(blame(c))}</p><dl>{listed}</dl></div>')
    lines = [f"reference: {describe(c.reference)}", f"port: {describe(c.other)}", counts(c), *c.notes, *absent(c)]
    parts.append("<p class=soft>" + "<br>".join(map(e, lines)) + "</p>")
    legend = ", ".join(f'<span class="{status}">● {words}</span>' for status, words in _WORDS.items())
    parts.append(f"<h2>Errors in data-flow order</h2><p class=soft>{legend}; dashed: allowed</p>" + _flow(c))
    plots = [(name, plot) for name in _LINES if (plot := _layers(c, name))]
    if plots:
        figures = "".join(
            f"<figure>{plot}<figcaption><code>{e(name)}</code></figcaption></figure>" for name, plot in plots
        )
        parts.append(f'<h2>Layer by layer</h2><div class="plots">{figures}</div>')
    parts.append("<h2>Sections</h2>")
    groups: dict[str, list[Row]] = {}
    for row in c.rows:
        groups.setdefault(_group(row), []).append(row)
    parts += [_details(c, name, rows) for name, rows in groups.items()]
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{e(headline(c))}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><body>{body}</body></html>\n'
    )


def _group(row: Row) -> str:
    step, section, layer = parse(row.name)
    stem = "pictures" if section.name.startswith("vision") else "text"
    return (f"step {step}, " if step else "") + stem + ("" if layer is None else f", layer {layer}")


def _details(c: Comparison, name: str, rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: list(COLOURS).index(row.status))
    cells = []
    for row in rows:
        numbers = [number(x) for x in (row.error, row.allowed, row.own, row.relative_rms, row.max_abs)]
        numbers.append("" if math.isnan(row.cosine) else f"{row.cosine:.6f}")
        cells.append(
            f'<tr><td class="name" title="{html.escape(row.section.computes)}">{html.escape(row.name)}</td>'
            + "".join(f"<td>{x}</td>" for x in numbers)
            + f'<td class="{row.status}">{row.status}{": " + html.escape(row.note) if row.note else ""}</td></tr>'
        )
    heads = "".join(f"<th>{x}</th>" for x in ("section", "error", "allowed", "own", "rms", "max", "cosine", ""))
    is_open = " open" if any(row is c.first for row in rows) else ""
    return (
        f'<details{is_open}><summary>{html.escape(name)} <span class="{worst.status}">{worst.status}</span></summary>'
        f"<table><tr>{heads}</tr>{''.join(cells)}</table></details>"
    )


_H, _LEFT, _RIGHT, _TOP, _BOTTOM = 260, 56, 12, 12, 30


class _Axes:
    """Errors on a logarithmic axis, places from left to right."""

    def __init__(self, values: list[float], n: int, width: int) -> None:
        self.width = width
        logs = [math.log10(v) for v in values if v > 0 and math.isfinite(v)] or [0.0]
        self.low, self.high, self.n = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1), n

    def x(self, i: int | float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * (i + 0.5) / self.n

    def y(self, value: float) -> float:
        level = self.high if value == math.inf else math.log10(value) if value > 0 else self.low
        share = (min(max(level, self.low), self.high) - self.low) / (self.high - self.low)
        return _H - _BOTTOM - share * (_H - _TOP - _BOTTOM)

    def frame(self) -> list[str]:
        step = max(1, (self.high - self.low) // 6)
        lines = []
        for power in range(self.low, self.high + 1, step):
            y = self.y(10.0**power)
            lines.append(f'<line class="grid" x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
        return lines


def _dot(axes: _Axes, i: int, row: Row, r: int | float, first: bool) -> str:
    x, y = axes.x(i), axes.y(row.error)
    title = html.escape(f"{row.name}: error {number(row.error)}, allowed {number(row.allowed)}, {row.status}")
    ring = f'<circle class="first" cx="{x:.1f}" cy="{y:.1f}" r="{r + 4}"/>' if first else ""
    return f'{ring}<circle class="dot {row.status}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"><title>{title}</title></circle>'


def _svg(axes: _Axes, label: str, parts: list[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {axes.width} {_H}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def _path(axes: _Axes, points: list[tuple[int, float]]) -> str:
    joined = " ".join(f"{axes.x(i):.1f},{axes.y(v):.1f}" for i, v in points)
    return f'<polyline class="allowed" points="{joined}"/>'


def _flow(c: Comparison) -> str:
    """Every section's error, and what was allowed (dashed)."""
    rows = [row for row in c.rows if row.section.kind != "choices"]
    axes = _Axes([v for row in rows for v in (row.error, row.allowed)], max(1, len(rows)), width=1000)
    parts, free = axes.frame(), 0.0  # where the next name may begin
    for i, row in enumerate(rows):
        group = _group(row)
        if i and group == _group(rows[i - 1]):
            continue
        x = axes.x(i - 0.5)
        if i:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_H - _BOTTOM}"/>')
        end = x + 7 * len(group)  # of the name, in letters of generous width
        if x >= free and end <= axes.width:
            free = end
            parts.append(f'<text x="{x:.1f}" y="{_H - 10}">{html.escape(group)}</text>')
    parts.append(_path(axes, [(i, row.allowed) for i, row in enumerate(rows)]))
    parts += [_dot(axes, i, row, 2.5, row is c.first) for i, row in enumerate(rows)]
    return _svg(axes, "error of every section in data-flow order, and what is allowed", parts)


def _layers(c: Comparison, pattern: str) -> str:
    """One section through the layers of the prompt's pass; nothing for fewer than two layers."""
    rows = [row for row in c.rows if row.section.name == pattern and parse(row.name).step == 0]
    if len(rows) < 2:
        return ""
    axes = _Axes([v for row in rows for v in (row.error, row.allowed)], len(rows), width=500)
    parts = axes.frame()
    every = max(1, len(rows) // 16)
    for i, row in enumerate(rows):
        if i % every == 0:
            parts.append(f'<text x="{axes.x(i):.1f}" y="{_H - 10}" text-anchor="middle">{parse(row.name).layer}</text>')
    parts.append(_path(axes, [(i, row.allowed) for i, row in enumerate(rows)]))
    parts += [_dot(axes, i, row, 4, row is c.first) for i, row in enumerate(rows)]
    return _svg(axes, f"error of {pattern} by layer, and what is allowed", parts)
