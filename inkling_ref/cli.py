"""The command line: `inkling-ref ask`, `info`, `trace`, `eval-nano`, `train-nano` and others: `inkling-ref --help`.

Whatever a user can correct ends as one line on stderr and exit status 2; Ctrl-C ends with 130. Only the answer goes to
stdout, so that it can be piped: thinking, reports and warnings go to stderr. torch is imported by the commands that
need it: `--help` and `info` answer without.
"""

import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from .errors import InputError
from .files import check_access, check_file, whole_file

if TYPE_CHECKING:
    from .chat import Tokenizer
    from .config import InklingConfig

INTERRUPTED = 130  # what typer makes of Ctrl-C
NANO = Path(__file__).parent / "data" / "nano"  # the checkpoint that ships with the package
SMALL_MODEL = 100_000_000  # parameters: below, one thread is enough
LONGEST_RANGE = 2**20  # positions of the longest context
GRACE = 3.0  # seconds that rank 0 has to speak first
LONG_PROMPT = 2000  # tokens: above, a word to the user who waits

app = typer.Typer(
    help="Inkling 2, as a reference: ask a model, look at its costs, train and evaluate nano.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open until the end
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _note(f"warning: {message}")
            status = app(arguments, prog_name="inkling-ref", standalone_mode=False) or 0
    except typer.TyperException as error:  # unknown commands and options
        # Empty where the help was shown for want of a command; pydantic prefixes its own name for the fault.
        if message := " ".join(error.format_message().replace("Value error, ", "").split()):
            _fault(message)
    except (InputError, UserWarning) as error:  # warnings are raised where Python was told to take them for errors
        _fault(error)
    except OSError as error:
        _fault(f"{error.filename or 'system'}: {error.strerror or error}")
    else:
        if status == INTERRUPTED:
            _note("interrupted")
        return status
    return 2


def _fault(what: object) -> None:
    """Under torchrun, where most faults are found by all ranks, rank 0 speaks; it ends the others before they do."""
    rank = os.environ.get("RANK", "0")
    if rank.isdecimal() and int(rank):
        time.sleep(GRACE)
        what = f"rank {rank}: {what}"
    _note(f"error: {what}")


def _note(line: str) -> None:
    """One line to stderr, whatever the names in it hold. A stderr that cannot be written to is no fault."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _importing() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once: some libraries swallow KeyboardInterrupt while they are imported."""

    def stop(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(INTERRUPTED)

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


Checkpoint = Annotated[
    Path,
    typer.Option(
        help="Folder with config.json, *.safetensors and tokenizer.json; default: the shipped nano.", show_default=False
    ),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model runs.")]


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path] | None, typer.Option(help="A picture, before the question; repeatable.")] = None,
    checkpoint: Checkpoint = NANO,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Make sampling reproducible.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.")] = 256,
    effort: Annotated[str, typer.Option(help="Thinking effort: 0 to 0.99, or none, low, medium, high, max.")] = "0.9",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    device: Device = "cpu",
    backend: Annotated[Literal["torch", "triton"], typer.Option(help="What runs the operations.")] = "torch",
    draft: Annotated[bool, typer.Option("--draft", help="Speculative decoding with the checkpoint's drafter.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Decode with fixed addresses, on a GPU as one CUDA graph.")
    ] = False,
) -> None:
    """Answer a question, about pictures if there are any. The answer streams to stdout."""
    if not question.strip():
        raise InputError("question: empty, expected text")
    messages = [{"role": "system", "content": system}] if system else []
    pictures = [{"type": "image", "image": str(path)} for path in image or []]
    messages.append({"role": "user", "content": [*pictures, question]})

    with _importing():
        from . import checkpoint as checkpoints
        from . import generation
        from .chat import Tokenizer, render
        from .config import InklingConfig
        from .decode_step import DecodeStep
        from .draft_files import find, load_drafter
        from .draft_step import DraftStep
        from .measure.cost import parameters

    # A wrong folder, picture or message is found before the weights are read.
    config, tokenizer = InklingConfig.from_pretrained(checkpoint), Tokenizer.from_pretrained(checkpoint)
    prompt = render(messages, tokenizer, effort=_effort(effort), config=config)
    if draft:
        find(checkpoint)

    use_few_threads(config, device)
    if len(prompt.input_ids) > LONG_PROMPT:
        tiles = 0 if prompt.pixel_values is None else len(prompt.pixel_values)
        _note(f"{len(prompt.input_ids)} tokens to read, {tiles} of them tiles of pictures: this takes a while")
    start = time.perf_counter()
    model = checkpoints.load(checkpoint, device=device, dtype=_dtype(device), backend=backend)
    drafter = load_drafter(checkpoint, model) if draft else None
    step = None
    if graph:
        longest = min(len(prompt.input_ids) + max(max_new_tokens, 0), config.text.max_position_embeddings)
        tokens, taps = (1 + drafter.num_draft_tokens, drafter.config) if drafter else (1, None)
        step = DecodeStep(model, 1, longest + tokens, tokens, taps=taps)
        if device == "cuda":
            step.capture(greedy=temperature == 0)
        drafter = drafter and DraftStep(drafter, step)
    load_seconds = time.perf_counter() - start
    stream = generation.stream(
        model,
        [prompt.input_ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=tokenizer.end_ids,
        pixel_values=prompt.pixel_values,
        image_grid_thw=prompt.image_grid_thw,
        drafter=drafter,
        step=step,
    )
    _show((token for (token,) in stream), tokenizer)
    stats, (reason,) = stream.result.stats, stream.result.stop_reason
    speed = (stats.new_tokens - 1) / stats.decode_seconds if stats.decode_seconds else 0.0
    size = _count(parameters(config).total())
    _note(
        f"{checkpoint.resolve().name}, {size} | loaded in {load_seconds:.2f} s | "
        f"{stats.prompt_tokens} tokens read in {stats.prefill_seconds:.2f} s | "
        f"{stats.new_tokens} written, {speed:.0f}/s" + ("" if reason == "eos" else f" | cut: {reason}")
    )
    if (drafting := stats.drafting) and drafting.row_rounds:
        _note(
            f"drafting: {drafting.tokens_per_pass:.2f} tokens a pass of the target | "
            f"{1000 * drafting.draft_seconds / drafting.row_rounds:.1f} ms to draft, "
            f"{1000 * drafting.verify_seconds / drafting.row_rounds:.1f} ms to check"
        )
        shares = zip(drafting.acceptance(), drafting.checked, strict=True)
        _note(f"accepted by position: {_percents([share if checked else None for share, checked in shares])} %")


def use_few_threads(config: "InklingConfig", device: str) -> None:
    """One thread for a small model on a CPU, unless the user said otherwise (OMP_NUM_THREADS).

    Its operations are too short to share: with two threads nano decodes no faster on an idle machine, and several
    times slower on a busy one, where they wait for each other at every operation.
    """
    import torch

    from .measure.cost import parameters

    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ and parameters(config).total() < SMALL_MODEL:
        torch.set_num_threads(1)


def _percents(shares: Iterable[float | None]) -> str:
    """None: nothing was checked there, as behind a short answer's end."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares)


class _Printer:
    """Text to stdout as it comes; thinking, dimmed, to stderr. Every block begins a new line."""

    def __init__(self) -> None:
        from rich.console import Console

        self.aside = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.block: Any = None  # the one that is being written
        if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode still gets its answer

    def show(self, delta: Any) -> None:
        if delta.block is not self.block:
            self.end()
            self.block = delta.block
        if delta.kind == "thinking":
            self.aside.print(delta.text, style="dim", end="")
        else:
            print(delta.text, end="", flush=True)

    def end(self) -> None:
        if self.block is not None:
            print(file=sys.stderr if self.block.kind == "thinking" else sys.stdout, flush=True)


def _show(reply: Iterable[int], tokenizer: "Tokenizer") -> None:
    """A reply as it comes, token by token."""
    from .chat import StreamParser

    parser, printer = StreamParser(tokenizer), _Printer()
    for token in reply:
        for delta in parser.feed(token):
            printer.show(delta)
    for delta in parser.finish():
        printer.show(delta)
    printer.end()


def _dtype(device: str) -> Any:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here, expected cpu")
    return torch.float32 if device == "cpu" else torch.bfloat16


def _effort(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a name, which `render` checks


@app.command("eval-nano")
def eval_nano(
    checkpoint: Checkpoint = NANO,
    tasks: Annotated[str | None, typer.Option(help="Their names, with commas between; default: all.")] = None,
    examples: Annotated[int, typer.Option(help="Of each task.")] = 100,
    precision: Annotated[Literal["shipped", "bf16", "both"], typer.Option(help="Of the experts.")] = "shipped",
) -> None:
    """Exact match by task, on held-out examples of the small world."""
    with _importing():
        from .config import InklingConfig
        from .nano import evaluate

    use_few_threads(InklingConfig.from_pretrained(checkpoint), "cpu")
    names = _names(tasks) if tasks else None
    evaluate.main(checkpoint, tasks=names, examples=examples, precision=precision)


def _check_writable(folder: Path) -> None:
    """That a checkpoint can be put there: said before minutes of training, not after."""
    path = folder.absolute()
    for place in (path, path.parent):  # `save` writes beside the folder first
        nearest = next(p for p in (place, *place.parents) if p.exists())
        if not nearest.is_dir():
            raise InputError(f"{nearest}: a file, expected a folder")
        check_access(nearest)


@app.command("train-nano")
def train_nano(
    out: Annotated[Path, typer.Argument(help="Folder for the checkpoint.")],
    minutes: Annotated[float, typer.Option(help="Of training; compiling and writing come on top.")] = 8.0,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the data.", min=0, max=2**63 - 1)] = 0,
    preset: Annotated[Literal["nano", "mini"] | None, typer.Option(help="Default: mini on a CPU.")] = None,
) -> None:
    """Train a nano from nothing, on the small world's endless pictures, stories and sums."""
    _check_writable(out)
    with _importing():
        from .nano import train

    train.main(out, minutes=minutes, device=device, seed=seed, preset_name=preset)


@app.command()
def bench(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP...]|dspark|collectives",
            help="Groups of kernels (another name lists them; default: all), dspark, or (under torchrun) collectives.",
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Of the kernels: some of reference,compile,sdpa,flex,transformers; default: all.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A further arm, module:function, with the arguments of the OP's reference (not for layer, step, "
            "flex_*: they have none); repeatable."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the times to this file too; not dspark's.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of the kernels' whole run; default: 280.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Of dspark: its folder; default: the shipped nano.", show_default=False)
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="Where dspark or collectives run; default: cpu.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Nano's, with commas between; default: with long answers.")] = None,
    examples: Annotated[int | None, typer.Option(help="Of each task; default: 16.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; default: 0 and 1.")] = None,
    find_layout: Annotated[
        bool, typer.Option("--find-layout", help="Try the choices that the drafter's file leaves open instead.")
    ] = False,
    same_text: Annotated[
        bool, typer.Option("--same-text", help="Check instead that greedy answers are those of plain decoding.")
    ] = False,
) -> None:
    """Kernels on a GPU beside their reference and peers, and limits; drafting beside plain decoding; or collectives."""
    kernels = {"--against": against, "--peer": peer, "--json": json_file, "--seconds": seconds}
    drafting = {
        "--checkpoint": checkpoint, "--device": device, "--tasks": tasks, "--examples": examples,
        "--temperature": temperature, "--find-layout": find_layout, "--same-text": same_text,
    }  # fmt: skip
    kinds = {"the kernels": kernels, "dspark": drafting, "collectives": {"--json": json_file, "--device": device}}
    kind = what[0] if what in (["dspark"], ["collectives"]) else "the kernels"
    for option, value in (kernels | drafting).items():
        if value not in (None, False) and option not in kinds[kind]:
            whose = " and ".join(other for other, options in kinds.items() if option in options)
            raise InputError(f"{option}: belongs to {whose}, expected it there alone")
    if kind == "collectives":
        _bench_collectives(device or "cpu", json_file)
    elif kind == "dspark":
        examples = 16 if examples is None else examples
        _bench_drafting(
            checkpoint or NANO, device or "cpu", tasks, examples, temperature or [], find_layout, same_text
        )  # fmt: skip
    else:
        _bench_kernels(what or [], against, peer or [], 280.0 if seconds is None else seconds, json_file)


def _bench_collectives(device: str, json_file: Path | None) -> None:
    with _importing():
        import torch

        from .parallel import calibrate
        from .parallel.launch import rank_and_size

    _dtype(device)  # says whether there is a GPU
    if json_file is not None and rank_and_size()[0] == 0:
        check_file(json_file, "report")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks of one machine would fight for its cores
    if report := calibrate.main(device, json_file):
        print(calibrate.table(report))


def _bench_kernels(
    ops: list[str], against: str | None, peers: list[str], seconds: float, json_file: Path | None
) -> None:
    if not seconds > 0:
        raise InputError(f"--seconds is {seconds}, expected more than 0")
    if json_file is not None:
        check_file(json_file, "report")
    with _importing():
        from .measure.bench import runner

    beside = list(runner.KINDS.values()) if against is None else _names(against)
    runner.run(runner.check(ops, beside, peers), beside, peers, seconds, json_file, _note)


def _bench_drafting(
    checkpoint: Path, device: str, tasks: str | None, examples: int, temperature: list[float], find_layout: bool,
    same_text: bool,
) -> None:  # fmt: skip
    """Acceptance and speed of the checkpoint's drafter, side by side with plain decoding in one run."""
    from rich.console import Console
    from rich.table import Table

    if examples < 1:
        raise InputError(f"--examples is {examples}, expected at least 1")
    if find_layout and (same_text or tasks or temperature):
        raise InputError(
            "--find-layout has questions of its own, expected it without --same-text, --tasks, --temperature"
        )
    if same_text and temperature:
        raise InputError("--same-text compares greedy answers, expected it without --temperature")
    with _importing():
        from . import checkpoint as checkpoints
        from .draft_files import load_drafter
        from .measure import drafting
        from .sampling import check_sampling
        from .speculative import Drafting, measure_seconds

    for warmth in temperature:
        check_sampling(warmth, None, None)

    model = checkpoints.load(checkpoint, device=device, dtype=_dtype(device))
    drafter = load_drafter(checkpoint, model)
    for line in f"drafter: {drafter.config.kind}".splitlines():
        _note(line)
    if find_layout:
        _note("every combination of the open choices is tried: this takes a while")
        table = Table(*drafting.OPEN, "first draft", "others", box=None)
        for choices, first, others in drafting.find_layout(checkpoint, model):
            table.add_row(*map(str, choices.values()), f"{first:.3f}", f"{others:.3f}")
        Console(width=110).print(table)
        return
    if same_text:
        failed, names = False, _names(tasks) if tasks else drafting.all_tasks()
        drafting.check_tasks(names)  # before the heading
        row = "{:14} {:>7} {:>7} {:>13}  {}".format
        print(row("task", "answers", "tokens", "tokens a pass", "different"), flush=True)
        for task, same in drafting.same_answers(checkpoint, model, drafter, names, examples):
            failed |= bool(same.different)
            different = ", ".join(map(str, same.different[:5])) or "none"
            print(row(task, same.answers, same.tokens, f"{same.tokens_per_pass:.2f}", different), flush=True)
        raise typer.Exit(failed)
    names = _names(tasks) if tasks else drafting.TASKS
    drafting.check_tasks(names)  # before the heading
    row = "{:14} {:>4} {:>6} {:>6} {:>6} {:>5} {:>5} {}".format
    print(row("", "", "", "tokens", "tokens", "plain", "", ""))
    print(row("task", "temp", "drafts", "a pass", "/s", "/s", "ratio", "accepted by position, %"), flush=True)
    for warmth in temperature or (0.0, 1.0):
        for greedy in (False, True) if warmth else (True,):
            how = Drafting(drafter, greedy=greedy)
            for task, r in drafting.by_task(checkpoint, model, how, names, examples, warmth):
                numbers = (f"{warmth:g}", "greedy" if greedy else "drawn", f"{r.tokens_per_pass:.2f}")
                ratio = f"{r.tokens_per_second / r.without:.2f}" if r.without else "-"  # answers of one token: no time
                speeds = (f"{r.tokens_per_second:.0f}", f"{r.without:.0f}", ratio)
                print(row(task, *numbers, *speeds, _percents(r.acceptance)), flush=True)
    seconds = measure_seconds(model, drafter, drafting.some_ids(model))
    cost = " ".join(f"{1000 * s:.3g}" for s in seconds)
    print(f"ms a round that reads 1, 2, ... tokens: {cost}")


@app.command()
def trace(
    out: Annotated[Path, typer.Option(help="The file to write, *.safetensors.")],
    checkpoint: Checkpoint = NANO,
    prompt: Annotated[str | None, typer.Option(help="What to ask, as in `ask`.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Instead: a JSON list of ids, or a trace to repeat.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture; repeatable.")] = None,
    decode: Annotated[int | None, typer.Option(help="Read this many further tokens, each the likeliest.")] = None,
    layers: Annotated[str | None, typer.Option(help="Of the text model, as 0-3,17; default: all.")] = None,
    sections: Annotated[
        str | None, typer.Option(help="As attention.q,moe.*.chosen; +probabilities adds to the usual ones; or all.")
    ] = None,
    positions: Annotated[str | None, typer.Option(help="Of the prompt, as 0-3,-1; default: all.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"], typer.Option(help="Of weights and stream.")
    ] = "float32",
    device: Device = "cpu",
    backend: Annotated[Literal["torch", "triton"], typer.Option(help="What runs the operations.")] = "torch",
) -> None:
    """Write every section's tensors of one forward pass to a file, to compare another implementation with."""
    if (prompt is None) == (tokens is None):
        raise InputError("trace: expected either --prompt or --tokens")
    check_file(out, "trace")
    with _importing():
        import torch

        from . import checkpoint as checkpoints
        from .chat import Tokenizer, render
        from .config import InklingConfig
        from .measure import trace as tracing
        from .vision import load_image, process_images

    config = InklingConfig.from_pretrained(checkpoint)
    pixel_values = image_grid_thw = None
    if prompt is not None:
        content = [*({"type": "image", "image": str(path)} for path in image or []), prompt]
        tokenizer = Tokenizer.from_pretrained(checkpoint)
        rendered = render([{"role": "user", "content": content}], tokenizer, config=config)
        ids, steps = [rendered.input_ids], 0
        pixel_values, image_grid_thw = rendered.pixel_values, rendered.image_grid_thw
    else:
        ids, steps = tracing.read_tokens(tokens)
        if image:
            pixel_values, image_grid_thw = process_images([load_image(path) for path in image], config.vision)
    wanted = {
        "layers": None if layers is None else _numbers("--layers", layers),
        "sections": None if sections is None else _names(sections),
        "positions": None if positions is None else _numbers("--positions", positions),
    }
    tracing.chooser(wanted["sections"])  # a wrong name is found before the weights are read
    use_few_threads(config, device)
    _dtype(device)
    model = checkpoints.load(checkpoint, device=device, dtype=getattr(torch, dtype), backend=backend)
    steps = steps if decode is None else decode
    recorded = tracing.trace(model, ids, pixel_values, image_grid_thw, decode=steps, **wanted)
    if not recorded.tensors:
        raise InputError("trace: this pass has none of the sections that --sections and --layers ask for")
    recorded.save(out)
    rows, decoded = recorded.manifest["prompt"], recorded.manifest["decoded"]
    _note(
        f"{out}: {len(recorded.tensors)} tensors, {_bytes(recorded.nbytes)} | "
        f"{sum(map(len, rows))} tokens read, {sum(map(len, decoded))} decoded | {dtype}, {backend}"
    )


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="The report to write, *.json.")],
    checkpoint: Annotated[Path | None, typer.Option(help="Each rank reads its slices of this folder.")] = None,
    synthetic: Annotated[
        Literal["small", "nano", "tiny"] | None, typer.Option(help="Instead: random weights for a built-in config.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share attention.")] = 1,
    dp: Annotated[int, typer.Option(help="Groups of such ranks, each with its own rows of the batch.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Parts that experts fall into; default: as many as ranks.")] = None,
    exchange: Annotated[
        Literal["all_reduce", "all_to_all"], typer.Option(help="How tokens reach their experts.")
    ] = "all_reduce",
    sequence: Annotated[
        bool, typer.Option("--sequence", help="Cut long calls by tokens among the tp ranks, between sublayers.")
    ] = False,
    sequence_from: Annotated[
        int | None, typer.Option(help="Of --sequence: cut calls of so many tokens a row; default: 64.")
    ] = None,
    only_rank: Annotated[int | None, typer.Option(help="Run this rank alone, with stand-ins for the others.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask, as in `ask`.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="A picture; repeatable.")] = None,
    tokens: Annotated[list[str] | None, typer.Option(help="Instead: ids, as 1,2,3; a row each, repeatable.")] = None,
    context: Annotated[int | None, typer.Option(help="Instead: that many random ids a row.")] = None,
    batch: Annotated[int, typer.Option(help="Rows of random ids.", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Of each row.")] = 16,
    prefill_chunk: Annotated[int | None, typer.Option(help="Read that many positions a call.")] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Speculative decoding with the checkpoint's drafter.")] = False,
    graph: Annotated[
        bool, typer.Option("--graph", help="Decode with fixed addresses, on a GPU as one CUDA graph.")
    ] = False,
    filled: Annotated[
        bool, typer.Option("--filled", help="Of --graph: random keys and values stand for --context; nothing is read.")
    ] = False,
    step_tokens: Annotated[
        int | None, typer.Option(help="Of --filled: tokens of a row that a step reads; default: 1.")
    ] = None,
    experts: Annotated[
        Literal["bf16", "mxfp8", "nvfp4+mxfp8"] | None,
        typer.Option(help="Format of synthetic experts; default: nvfp4+mxfp8."),
    ] = None,
    skew: Annotated[
        float | None, typer.Option(help="Synthetic: fall of the router's bias from first to last expert; default: 0.")
    ] = None,
    device: Device = "cpu",
    backend: Annotated[
        Literal["torch", "compile", "triton"],
        typer.Option(help="What runs the operations: the reference, compiled (of --filled), or the kernels."),
    ] = "torch",
    alpha: Annotated[
        float | None, typer.Option(help="Of --only-rank's modelled collectives: microseconds a call; default: 20.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Of --only-rank's modelled collectives: GB/s that it sends; default: 450.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a collective may take.")] = 300.0,
    trace: Annotated[bool, typer.Option("--trace", help="Record the spans of modules and collectives.")] = False,
) -> None:
    """Run a model on many ranks, under torchrun, or one rank of many alone; seconds, bytes and memory to JSON."""
    if (checkpoint is None) == (synthetic is None):
        raise InputError("run: expected either --checkpoint or --synthetic")
    if sum(given is not None for given in (prompt, tokens, context)) != 1:
        raise InputError("run: expected one of --prompt, --tokens and --context")
    if batch > 1 and context is None:
        raise InputError("run: --batch is for --context, expected --tokens once a row")
    if image and prompt is None:
        raise InputError("run: --image needs a question, expected --prompt")
    if draft and checkpoint is None and synthetic != "small":
        raise InputError("run: --draft needs a drafter, expected --checkpoint with one, or --synthetic small")
    for wanted, options in (
        ("--synthetic", {"--experts": experts, "--skew": skew} if checkpoint else {}),
        ("--only-rank", {"--alpha": alpha, "--bandwidth": bandwidth} if only_rank is None else {}),
        ("--sequence", {} if sequence else {"--sequence-from": sequence_from}),
        ("--graph", {} if graph else {"--filled": filled or None}),
        ("--context", {} if context is not None else {"--filled": filled or None}),
        ("--filled", {} if filled else {"--step-tokens": step_tokens}),
        ("--filled --synthetic", {} if filled and synthetic else {"--backend compile": backend == "compile" or None}),
    ):
        for option, value in options.items():
            if value is not None:
                raise InputError(f"run: {option} belongs to {wanted}, expected it there alone")
    others = {"--draft": draft and filled, "--trace": trace, "--dp": dp > 1, "--sequence": sequence and filled}
    on_step = "--filled" if filled else "--graph"
    for option, given in others.items():
        if graph and given:
            raise InputError(f"run: {option} with {on_step}, expected one without the other")
    if graph and exchange != "all_reduce":
        raise InputError(f"run: --exchange {exchange} with --graph, expected all_reduce")
    if sequence and tp == 1:
        raise InputError("--sequence cuts tokens among the tp ranks, expected --tp 2 or more")
    skew = _between("--skew", skew or 0.0, -1e6, 1e6)
    alpha = _between("--alpha", 20.0 if alpha is None else alpha, 0.0, 1e9)
    bandwidth = _between("--bandwidth", 450.0 if bandwidth is None else bandwidth, 1e-6, 1e9)
    _between("--timeout", timeout, 1.0, 1e6)
    with _importing():
        from .chat import Tokenizer
        from .parallel import run as running
        from .parallel.collectives import Link
        from .parallel.launch import rank_and_size
        from .parallel.plan import Plan
        from .sampling import check_count

    check_count("--max-new-tokens", max_new_tokens, 1)  # for none, the prompt would not be read
    if prefill_chunk is not None:
        check_count("--prefill-chunk", prefill_chunk, 1)
    if sequence_from is not None:
        check_count("--sequence-from", sequence_from, 1)
    if step_tokens is not None:
        check_count("--step-tokens", step_tokens, 1)
    is_writer = rank_and_size()[0] == 0  # other ranks may be on hosts without that folder
    if is_writer:
        check_file(out, "report")
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(1)  # ranks of one machine would fight for its cores
    rows = None if tokens is None else [_numbers("--tokens", row) for row in tokens]
    report = running.main(
        out,
        Plan(tp, dp, ep, exchange, sequence, sequence_from or Plan.sequence_from),
        checkpoint=checkpoint,
        preset=synthetic,
        prompt=prompt,
        images=image,
        tokens=rows,
        random_tokens=None if context is None else (batch, context),
        max_new_tokens=max_new_tokens,
        prefill_chunk=prefill_chunk,
        draft=draft,
        only_rank=only_rank,
        device=device,
        dtype=_dtype(device),
        backend=backend,
        experts=experts or "nvfp4+mxfp8",
        skew=skew,
        link=Link(alpha / 1e6, bandwidth * 1e9),
        timeout=timeout,
        trace=trace,
        graph=graph,
        filled=filled,
        step_tokens=step_tokens or 1,
    )
    if is_writer:
        if "answer" in report:
            _show(report["ranks"][0]["tokens"][0], Tokenizer.from_pretrained(checkpoint))
        for line in running.summary(report):
            _note(line)


@app.command("make-golden")
def golden(
    out: Annotated[Path, typer.Argument(help="A new folder for the set.")],
    case: Annotated[list[str] | None, typer.Option(help="Only this case; repeatable. See the shipped README.")] = None,
    seed: Annotated[int, typer.Option(help="The first to try for weights.", min=0, max=2**32)] = 0,
) -> None:
    """Write small checkpoints with expected traces, corner by corner, for people who port the model."""
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out.absolute().parent}: not found, expected a folder for the set")
    with _importing():
        import torch

        from .measure import make_golden

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as in use_few_threads
    size = make_golden.make_golden(out, case, seed)
    _note(f"{out}: {len(case or make_golden.CASES)} cases, {_bytes(size)}; see its README.md")


def _between(option: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # nor is a NaN
        raise InputError(f"{option} is {value:g}, expected a number from {low:g} to {high:g}")
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _numbers(option: str, text: str) -> list[int]:
    """`0-3,17` as 0, 1, 2, 3, 17."""
    numbers: list[int] = []
    for part in _names(text):
        match = re.fullmatch(r"(-?\d+)(?:-(-?\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < LONGEST_RANGE:
            raise InputError(f"{option} is {text!r}, expected numbers and ranges like 0-3,17")
        numbers += range(first, last + 1)
    return numbers


@app.command()
def compare(
    reference: Annotated[Path, typer.Argument(help="A trace: what the numbers should be.")],
    port: Annotated[list[Path], typer.Argument(help="Another; with --map any dumps, one of each pass.")],
    everything: Annotated[bool, typer.Option("--all", help="Show every section.")] = False,
    map_file: Annotated[Path | None, typer.Option("--map", help="What the port's names and layouts mean.")] = None,
    replay: Annotated[
        str | None,
        typer.Option(help="Compare these sections alone (patterns, or all): the reference runs on the port's inputs."),
    ] = None,
    checkpoint: Annotated[
        Path, typer.Option(help="For --replay: the weights that both ran with; default: nano.", show_default=False)
    ] = NANO,
    dtype: Annotated[str | None, typer.Option(help="Whose tolerances; default: the coarser of both traces'.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file too.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file too.")] = None,
) -> int:
    """Name the first section of a forward pass in which two traces part. Exit status: 0 they agree, 1 they part."""
    for path in (json_file, html_file):
        if path is not None:
            check_file(path, "report")
    with _importing():
        from .measure import compare as comparing
        from .measure import report
        from .measure.adapters import recorded

    if len(port) > 1 and map_file is None:
        raise InputError(f"compare: {len(port)} dumps of the port, expected one trace, or --map")
    other = port[0] if map_file is None else recorded.read(port, map_file, like=reference)
    replayed = None if replay is None else comparing.replayer(checkpoint, other)
    found = comparing.compare(reference, other, replayed, None if replay is None else _names(replay), dtype)
    report.show(found, everything)
    for path, make in ((json_file, report.to_json), (html_file, report.to_html)):
        if path is not None:
            with whole_file(path) as partial:
                partial.write_text(make(found), encoding="utf-8")
    return found.exit_status


@app.command()
def info(
    checkpoint: Annotated[Path | None, typer.Option(help="Folder with a config.json.")] = None,
    preset: Annotated[
        Literal["small", "nano", "tiny"] | None, typer.Option(help="A built-in config; default: small.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share attention and unembedding.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts.")] = 1,
    context: Annotated[int | None, typer.Option(help="Tokens of a sequence; default: as many as fit.")] = None,
) -> None:
    """Parameters, bytes, cache and FLOPs of a model, whole or on one rank, from its config alone."""
    from rich.console import Console

    from .config import InklingConfig
    from .draft_config import DSparkConfig
    from .measure import cost

    if checkpoint and preset:
        raise InputError("info: both --checkpoint and --preset are given, expected one of them")
    config = InklingConfig.from_pretrained(checkpoint) if checkpoint else getattr(InklingConfig, preset or "small")()
    longest = config.text.max_position_embeddings
    context = longest if context is None else context
    if not 0 < context <= longest:
        raise InputError(f"--context is {context}, expected 1 to max_position_embeddings {longest}")
    rank = "" if tp == ep == 1 else f", one rank of TP {tp}, EP {ep}"
    counts = {"all": cost.parameters(config), "active per token": cost.active_parameters(config)}
    whole, active = counts.values()
    if rank:
        counts["on the rank"] = cost.parameters(config, tp, ep)
    weights = {f"as {name}": cost.checkpoint_bytes(config, name, tp, ep) for name in get_args(cost.ExpertFormat)}
    if checkpoint and any(checkpoint.glob("*.safetensors")):
        weights["on disk"] = _on_disk(checkpoint)
    cache, shorter = cost.cache_bytes(config, context, tp), cost.cache_bytes(config, context - 1, tp)
    work = {
        f"decode token {context:,}": cost.flops(config, context, 1, tp, ep),
        f"prefill {context:,} tokens": cost.flops(config, context, context, tp, ep),
    }
    draft = DSparkConfig() if config == InklingConfig.small() else None
    if checkpoint:
        from .draft_files import FILE, read_config

        draft = read_config(checkpoint, config) if (checkpoint / FILE).is_file() else None
    drafter = {}
    for name, ranks in {"all": 1, **({"on the rank": tp} if rank else {})}.items() if draft else ():
        sizes = {part: 2 * count for part, count in cost.drafter_parameters(config, draft, ranks).items()}
        sizes[f"context of {context:,} tokens"] = cost.drafter_cache_bytes(draft, context, ranks)
        drafter[name] = Counter(sizes)
    Console(width=80).print(
        f"{_count(whole.total())} parameters, {_count(cost.in_layers(active))} active in a token's layers",
        _table("Parameters", counts, "{:,}".format),
        _table(f"Bytes of the weights, by format of the experts{rank}", weights, _bytes),
        _table(
            f"Cache of one sequence{rank}",
            {f"{context:,} tokens": cache, "each further token": cache - shorter},
            _bytes,
        ),
        _table(f"Work of the text stack{rank}", work, lambda count: _si(count, "FLOP")),
        *([_table("Drafter in bfloat16, and its cache of one sequence", drafter, _bytes)] if draft else []),
    )


def _on_disk(checkpoint: Path) -> Counter:
    """Bytes of a folder's tensors by storage format, as `cost.checkpoint_bytes` names them."""
    import torch

    from .quantization import dtype_name
    from .tensor_files import CheckpointReader

    weights = {torch.uint8: "NVFP4 codes", torch.float8_e4m3fn: "MXFP8 values"}
    scales = {torch.uint8: "MXFP8 scales", torch.float8_e4m3fn: "NVFP4 scales", torch.float32: "NVFP4 scales"}
    sizes: Counter = Counter()
    with CheckpointReader(checkpoint) as reader:
        for name in reader.names:
            stored = reader.layout(name)
            kinds = scales if ".experts." in name and not name.endswith("_weight") else weights
            sizes[kinds.get(stored.dtype, dtype_name(stored.dtype))] += stored.nbytes
    return sizes


def _table(title: str, columns: dict[str, Counter], show: Callable[[int], str]) -> Any:
    """A table with one row for each key, in order, and their total."""
    from rich import box
    from rich.table import Table

    table = Table("", title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, min_width=80)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    parts = list(dict.fromkeys(part for column in columns.values() for part in column))
    for part in parts:
        cells = [show(column[part]) if part in column else "" for column in columns.values()]
        table.add_row(part, *cells, end_section=part == parts[-1])
    table.add_row("total", *(show(column.total()) for column in columns.values()))
    return table


def _si(number: float | int, unit: str, giga: str = "G") -> str:
    prefixes = ["", "k", "M", giga, "T", "P", "E"]
    while number >= 999.95 and len(prefixes) > 1:
        number = number / 1000
        del prefixes[0]
    return f"{number:.4g} {prefixes[0]}{unit}"


def _count(number: int) -> str:
    return _si(number, "", giga="B").strip()


def _bytes(number: int) -> str:
    return _si(number, "B")


if __name__ == "__main__":
    sys.exit(main())
