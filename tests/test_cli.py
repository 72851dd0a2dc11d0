"""The command line: what goes where, and how it ends when something is wrong."""

import contextlib
import inspect
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import hide_triton, random_model
from PIL import Image
from tiny_tokenizer import raw_tokenizer

from inkling_ref import Drafter, DSparkConfig, chat, checkpoint, cli, generation, load_drafter, save_drafter
from inkling_ref.config import InklingConfig
from inkling_ref.errors import InputError
from inkling_ref.measure.drafting import find_layout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of a tiny random model that knows the markers."""
    path, tokenizer, tiny = tmp_path_factory.mktemp("tiny"), raw_tokenizer(), InklingConfig.tiny()
    used = tokenizer.get_vocab_size()
    config = replace(
        tiny,
        text=replace(tiny.text, vocab_size=used + 5, unpadded_vocab_size=used),
        image_token_id=tokenizer.token_to_id(chat.IMAGE_PLACEHOLDER),
    )
    checkpoint.save(random_model(config), path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "picture.png"
    Image.new("RGB", (11, 7), "red").save(path)
    return path


@pytest.fixture
def reply(monkeypatch, folder):
    """Makes the model say the given ids, whatever it is asked; records what generation was given."""
    tokenizer = chat.Tokenizer.from_pretrained(folder)

    def say(*parts: str, reason: str = "eos") -> dict:
        ids = []
        for part in parts:
            ids += [tokenizer.markers[part]] if part in tokenizer.markers else tokenizer.encode(part)
        seen = {}

        def stream(model, input_ids, **options):
            seen.update(options, input_ids=input_ids)
            stats = generation.Stats(prompt_tokens=9, new_tokens=len(ids), prefill_seconds=0.5, decode_seconds=0.25)
            result = generation.Generation([ids], [reason], stats)
            return generation.Stream(iter([[token] for token in ids]), result)

        monkeypatch.setattr(generation, "stream", stream)
        return seen

    return say


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


# ---- ask

THOUGHT = (chat.CONTENT_THINKING, "hello world", chat.END_MESSAGE, chat.MESSAGE_MODEL)
ANSWER = (chat.CONTENT_TEXT, "the red circle 😀", chat.END_MESSAGE, chat.END_SAMPLING)


def test_only_the_answer_goes_to_stdout(capsys, folder, reply):
    reply(*THOUGHT, *ANSWER)
    status, out, err = run(capsys, "ask", "what?", "--checkpoint", folder)
    assert status == 0
    assert out == "the red circle 😀\n"
    thought, report = err.splitlines()
    assert thought == "hello world"
    assert re.fullmatch(
        rf"{folder.name}, \S+ k \| loaded in \d+\.\d\d s \| 9 tokens read in 0\.50 s \| "
        r"\d+ written, \d+/s",
        report,
    )


def test_every_block_begins_a_new_line(capsys, folder, reply):
    reply(*ANSWER[:-1], chat.MESSAGE_MODEL, *THOUGHT, *ANSWER)
    status, out, _ = run(capsys, "ask", "what?", "--checkpoint", folder)
    assert (status, out) == (0, "the red circle 😀\n" * 2)


def test_a_cut_reply_says_so(capsys, folder, reply):
    reply(chat.CONTENT_TEXT, "the red", reason="length")
    status, out, err = run(capsys, "ask", "what?", "--checkpoint", folder)
    assert (status, out) == (0, "the red\n")
    assert err.rstrip().endswith("| cut: length")


def test_every_option_arrives(capsys, folder, picture, reply):
    seen = reply(*ANSWER)
    sampling = ["--temperature", 0.5, "--top-p", 0.9, "--top-k", 7, "--seed", 3, "--max-new-tokens", 5]
    images = ["--image", picture, "--image", picture]
    arguments = ["ask", "hello", "--checkpoint", folder, "--system", "world", "--effort", "low", *sampling, *images]
    assert run(capsys, *arguments)[0] == 0
    assert (seen["temperature"], seen["top_p"], seen["top_k"], seen["seed"]) == (0.5, 0.9, 7, 3)
    assert seen["max_new_tokens"] == 5
    tokenizer = chat.Tokenizer.from_pretrained(folder)
    messages = [
        {"role": "system", "content": "world"},
        {"role": "user", "content": [*[{"type": "image", "image": str(picture)}] * 2, "hello"]},
    ]
    expected = chat.render(messages, tokenizer, effort="low", config=InklingConfig.from_pretrained(folder))
    assert seen["input_ids"] == [expected.input_ids]
    assert seen["pixel_values"].equal(expected.pixel_values)
    assert seen["image_grid_thw"].tolist() == [[1, 1, 2], [1, 1, 2]]
    assert tokenizer.markers[chat.END_SAMPLING] in seen["eos_token_id"]


@pytest.fixture
def drafting_folder(tmp_path, folder) -> Path:
    """That model with a drafter beside it."""
    shutil.copytree(folder, tmp_path / "both")
    model = checkpoint.load(folder)
    config = DSparkConfig(
        1, 2, 1, 6, 20, target_layer_ids=[1, 4], block_size=4, mask_token_id=0, markov_rank=3, d_rel=2, rel_extent=9
    )
    save_drafter(Drafter(config, model), tmp_path / "both")
    return tmp_path / "both"


def test_drafting_gives_the_same_answer_and_a_report(capsys, drafting_folder):
    arguments = ["ask", "hello", "--checkpoint", drafting_folder, "--max-new-tokens", 12]
    plain = run(capsys, *arguments)
    status, out, err = run(capsys, *arguments, "--draft")
    assert (status, out) == (0, plain[1])
    report = r"drafting: \d\.\d\d tokens a pass of the target \| .* ms to check\naccepted by position: \d+ \d+ \d+ %\n"
    assert re.search(rf"^{report}\Z", err, re.MULTILINE)


def test_fixed_addresses_give_the_same_answer(capsys, drafting_folder, picture):
    arguments = ["ask", "hello", "--image", picture, "--checkpoint", drafting_folder, "--max-new-tokens", 12]
    expected = run(capsys, *arguments)[:2]
    assert expected[0] == 0
    for options in (["--graph"], ["--graph", "--draft"]):
        assert run(capsys, *arguments, *options)[:2] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask"], "Missing argument 'question'."),
        (["info", "--preset", "big"], "Invalid value for '--preset': 'big' is not one of 'small', 'nano', 'tiny'."),
    ],
    ids=["none", "unknown"],
)
def test_what_typer_finds_is_one_plain_line(capsys, arguments, message):
    assert run(capsys, *arguments) == (2, "", f"error: {message}\n")


def test_find_layout_tries_the_open_choices(capsys, drafting_folder, monkeypatch):
    monkeypatch.setattr("inkling_ref.measure.drafting.QUESTIONS", ("hello",))
    monkeypatch.setattr("inkling_ref.measure.drafting.NEW_TOKENS", 4)
    status, out, err = run(capsys, "bench", "dspark", "--find-layout", "--checkpoint", drafting_folder)
    assert status == 0
    assert err.startswith("drafter: 1 layers, rnn head of rank 3, 3 tokens a block, taps 1, 4\nwith relative bias, ")
    heading, *lines = out.splitlines()
    assert heading.split()[:3] == ["sample_from_anchor", "tap", "final_tap"]
    assert len(lines) == len({tuple(line.split()[:5]) for line in lines}) == 48
    shares = [tuple(map(float, line.split()[5:])) for line in lines]
    assert all(0 <= share <= 1 for pair in shares for share in pair)
    sums = [a + b for a, b in shares]
    assert all(a >= b - 0.002 for a, b in itertools.pairwise(sums))


def test_find_layout_leaves_out_what_the_drafter_cannot_be(drafting_folder, monkeypatch):
    """Nothing comes before the embedding: a drafter that taps it has no layout with taps before or mixed."""
    monkeypatch.setattr("inkling_ref.measure.drafting.QUESTIONS", ("hello",))
    monkeypatch.setattr("inkling_ref.measure.drafting.NEW_TOKENS", 2)
    model = checkpoint.load(drafting_folder)
    save_drafter(load_drafter(drafting_folder, model, target_layer_ids=[-1, 4]), drafting_folder)
    found = find_layout(drafting_folder, model)
    assert len(found) == 16
    assert {choices["tap"] for choices, _, _ in found} == {"after"}


def test_a_real_model_is_repeatable(capsys, folder, picture):
    arguments = ["ask", "hello", "--image", picture, "--checkpoint", folder, "--max-new-tokens", 9]
    first = run(capsys, *arguments, "--temperature", 1, "--seed", 5)
    assert first[0] == 0
    assert run(capsys, *arguments, "--temperature", 1, "--seed", 5)[1] == first[1]


WRONG = {
    "picture missing": (["--image", "nowhere.png"], "nowhere.png"),
    "not a picture": (["--image", __file__], "not an image"),
    "no checkpoint": (["--checkpoint", "nowhere"], "config.json: not found"),
    "drafter": (["--draft"], "no drafter, expected mtp.safetensors"),
    "temperature": (["--temperature", "-1"], "temperature is -1.0"),
    "top p": (["--top-p", "1.5"], "top_p is 1.5"),
    "top k": (["--top-k", "0"], "top_k is 0"),
    "length": (["--max-new-tokens", "-1"], "max_new_tokens is -1"),
    "length, of a graph": (["--graph", "--max-new-tokens", "-999"], "max_new_tokens is -999"),
    "effort": (["--effort", "1.5"], "effort is 1.5"),
    "effort name": (["--effort", "lots"], "effort is 'lots'"),
    "device": (["--device", "tpu"], "'tpu'"),
    "backend": (["--backend", "jax"], "'jax'"),
    "option": (["--colour", "red"], "--colour"),
    "number": (["--seed", "x"], "'--seed'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_of_ask_is_one_line(capsys, folder, arguments, message):
    status, out, err = run(capsys, "ask", "hello", "--checkpoint", folder, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there Triton does not interpret, and the CPU has no kernels")
def test_the_kernels_answer_alike(capsys, folder):
    pytest.importorskip("triton", reason="the kernels need Triton")
    arguments = ["ask", "hello", "--checkpoint", folder, "--max-new-tokens", 2, "--effort", "none"]
    assert run(capsys, *arguments, "--backend", "triton")[:2] == run(capsys, *arguments)[:2]


def test_without_triton(capsys, folder, monkeypatch):
    hide_triton(monkeypatch)
    status, out, err = run(capsys, "ask", "hello", "--checkpoint", folder, "--backend", "triton")
    assert (status, out) == (2, "")
    assert err == "error: backend 'triton': Triton is not installed, expected `pip install triton`\n"


@pytest.mark.parametrize("question", ["", "  "], ids=repr)
def test_an_empty_question(capsys, folder, question):
    assert run(capsys, "ask", question, "--checkpoint", folder) == (2, "", "error: question: empty, expected text\n")


def test_a_checkpoint_without_tokenizer(capsys, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    status, out, err = run(capsys, "ask", "hello", "--checkpoint", tmp_path)
    assert (status, out) == (2, "")
    assert "tokenizer.json: not found" in err


def test_a_model_without_eyes(capsys, folder, picture, tmp_path):
    config = replace(InklingConfig.from_pretrained(folder), vision=None)
    checkpoint.save(random_model(config), tmp_path / "blind")
    (tmp_path / "blind" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    status, out, err = run(capsys, "ask", "hello", "--image", picture, "--checkpoint", tmp_path / "blind")
    assert (status, out) == (2, "")
    assert "no image encoder" in err


def test_cuda_without_a_gpu(capsys, folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, out, err = run(capsys, "ask", "hello", "--checkpoint", folder, "--device", "cuda")
    assert (status, out, err) == (2, "", "error: --device cuda: torch sees no GPU here, expected cpu\n")


# ---- endings


def raises(error: BaseException):
    def stream(*_, **__):
        raise error

    return stream


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("logits: not finite"), 2, "error: logits: not finite"),
        (
            PermissionError(13, "Permission denied", "model.safetensors"),
            2,
            "error: model.safetensors: Permission denied",
        ),
        (OSError("disk full"), 2, "error: system: disk full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["input", "file", "system", "interrupt"],
)
def test_an_error_is_one_line_and_a_status(capsys, folder, monkeypatch, error, status, line):
    monkeypatch.setattr(generation, "stream", raises(error))
    assert run(capsys, "ask", "hello", "--checkpoint", folder) == (status, "", line + "\n")


def test_our_own_faults_keep_their_traceback(folder, monkeypatch):
    monkeypatch.setattr(generation, "stream", raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["ask", "hello", "--checkpoint", str(folder)])


def test_a_warning_is_one_line(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("warnings.showwarning", None)  # main sets it; this puts it back
    config = (folder / "config.json").read_text().replace('"hidden_size"', '"zebra": 1, "hidden_size"', 1)
    (tmp_path / "config.json").write_text(config)
    status, _, err = run(capsys, "info", "--checkpoint", tmp_path)
    assert status == 0
    assert err.startswith("warning: ")
    assert "zebra" in err
    assert err.count("\n") == 1


def start(*arguments: object, before: str = "", **environment: str) -> subprocess.Popen:
    """The command line in a process of its own, after the lines of code `before`."""
    code = f"import sys\n{before}\nfrom inkling_ref.cli import main\nsys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


ENDLESS = """
import itertools, time
from inkling_ref import chat, generation
def stream(model, input_ids, **options):
    tokenizer = chat.Tokenizer.from_pretrained({folder!r})
    ids = itertools.chain([tokenizer.markers[chat.CONTENT_TEXT]], itertools.cycle(tokenizer.encode("hello")))
    return generation.Stream(([token] for token in ids if time.sleep(0.01) is None), None)
generation.stream = stream
"""


def test_ctrl_c_in_a_real_process(folder):
    process = start("ask", "hello", "--checkpoint", folder, before=ENDLESS.format(folder=str(folder)))
    assert process.stdout.read(1) == b"h"  # it is writing: interrupt it there
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err


def test_without_terminal_type_or_unicode(folder):
    process = start("info", "--preset", "nano", TERM="", LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"parameters" in out


def test_ctrl_c_while_importing_is_not_swallowed(folder):
    """A library that catches KeyboardInterrupt on import, as some do now and then, must not keep the command going."""
    before = """
import builtins, os, signal
original = builtins.__import__
def swallowing(name, *rest):
    if name == "torch":
        builtins.__import__ = original
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            pass
    return original(name, *rest)
builtins.__import__ = swallowing
"""
    process = start("ask", "hello", "--checkpoint", folder, "--max-new-tokens", 1, before=before)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"interrupted\n")


@pytest.mark.parametrize("descriptor", [1, 2], ids=["stdout", "stderr"])
def test_a_closed_stream(folder, descriptor):
    before = f"sys.{('', 'stdout', 'stderr')[descriptor]} = None  # what Python makes of it"
    process = start("ask", "hello", "--checkpoint", folder, "--max-new-tokens", 2, before=before)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert (out, err)[descriptor - 1] == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stderr_keeps_the_status(folder):
    command = [sys.executable, "-m", "inkling_ref.cli", "info", "--checkpoint", "nowhere"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stderr=full, env=environment, timeout=60).returncode == 2


def test_output_to_another_kind_of_stream(folder, reply):
    reply(*ANSWER)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(["ask", "hello", "--checkpoint", str(folder)]) == 0
    assert out.getvalue() == "the red circle 😀\n"


def test_a_name_with_line_breaks_stays_one_line(capsys):
    status, _, err = run(capsys, "info", "--checkpoint", "no\nsuch\x1bfolder")
    assert status == 2
    assert (
        err
        == r"error: no\nsuch\x1bfolder/config.json: not found, expected a checkpoint folder with a config.json" + "\n"
    )


def test_warnings_as_errors_are_one_line(capsys, folder, tmp_path):
    config = (folder / "config.json").read_text().replace('"hidden_size"', '"zebra": 1, "hidden_size"', 1)
    (tmp_path / "config.json").write_text(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, out, err = run(capsys, "info", "--checkpoint", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert "zebra" in err
    assert err.count("\n") == 1


# ---- info


def test_info_of_small(capsys):
    status, out, err = run(capsys, "info", "--preset", "small")
    assert (status, err) == (0, "")
    assert out.startswith("594.1 B parameters, 17.03 B active")
    assert max(map(len, out.splitlines())) <= 80
    assert "experts                           587,068,342,272             12,230,590,464" in out
    assert re.search(r"total +1\.188 TB +619\.6 GB +390\.2 GB", out)
    assert re.search(r"full layers +34\.36 GB +32\.77 kB", out)
    assert re.search(r"total +34\.53 GB +32\.77 kB", out)
    assert run(capsys, "info") == (0, out, "")


def test_info_of_one_rank(capsys):
    status, out, _ = run(capsys, "info", "--preset", "small", "--tp", 8, "--ep", 8, "--context", 100000)
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "one rank of TP 8, EP 8" in out
    assert re.search(r"experts +587,068,342,272 +12,230,590,464 +73,383,542,784", out)
    assert re.search(r"total +149.4 GB +78.32 GB +49.65 GB", out)
    assert "100,000 tokens" in out


def test_info_of_a_folder_counts_what_is_stored(capsys, folder, tmp_path):
    tiny = InklingConfig.tiny()
    config = replace(tiny, text=replace(tiny.text, moe_intermediate_size=32))
    checkpoint.save(random_model(config, dtype=torch.bfloat16), tmp_path / "mixed", experts="nvfp4+mxfp8")
    status, out, err = run(capsys, "info", "--checkpoint", tmp_path / "mixed")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for kind in ("bfloat16", "float32", "NVFP4 codes", "NVFP4 scales", "total"):
        (line,) = (
            line for line in out[out.index("Bytes") : out.index("Cache")].splitlines() if line.strip().startswith(kind)
        )
        *_, predicted, stored = re.findall(r"[\d.]+ k?B", line)
        assert stored == predicted, kind


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "'huge'"),
        (["--preset", "small", "--checkpoint", "x"], "both --checkpoint and --preset"),
        (["--checkpoint", "nowhere"], "config.json: not found"),
        (["--tp", "3"], "tp is 3, expected a divisor"),
        (["--ep", "0"], "ep is 0, expected a divisor"),
        (["--context", "0"], "--context is 0, expected 1 to max_position_embeddings 1048576"),
        (["--context", "1048577"], "--context is 1048577"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_argument_of_info_is_one_line(capsys, arguments, message):
    status, out, err = run(capsys, "info", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_numbers_beyond_all_prefixes():
    assert cli._si(999_949, "B") == "999.9 kB"
    assert cli._si(10**23, "B") == "1e+05 EB"


# ---- nano


@pytest.mark.parametrize(
    ("arguments", "module", "expected"),
    [
        (["eval-nano"], "evaluate", {"tasks": None, "examples": 100, "precision": "shipped"}),
        (
            ["eval-nano", "--tasks", "colour,count", "--examples", 7, "--precision", "both"],
            "evaluate",
            {"tasks": ["colour", "count"], "examples": 7, "precision": "both"},
        ),
        (["train-nano", "out"], "train", {"minutes": 8.0, "device": None, "seed": 0, "preset_name": None}),
        (
            ["train-nano", "out", "--minutes", 2, "--device", "cpu", "--seed", 3, "--preset", "mini"],
            "train",
            {"minutes": 2.0, "device": "cpu", "seed": 3, "preset_name": "mini"},
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_nano_commands_pass_their_options_on(capsys, monkeypatch, arguments, module, expected):
    seen = {}
    main = lambda folder, **options: seen.update(folder=folder, options=options)  # noqa: E731
    monkeypatch.setattr(f"inkling_ref.nano.{module}.main", main)
    assert run(capsys, *arguments) == (0, "", "")
    assert seen == {"folder": Path("out") if module == "train" else cli.NANO, "options": expected}


def test_train_nano_says_before_training_that_it_cannot_write(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("inkling_ref.nano.train.main", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "nano"):
        expected = f"error: {tmp_path / 'file'}: a file, expected a folder\n"
        assert run(capsys, "train-nano", out) == (2, "", expected)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    expected = f"error: {tmp_path}: cannot be written to, expected a folder that can\n"
    assert run(capsys, "train-nano", tmp_path / "nano") == (2, "", expected)


def test_a_seed_of_train_nano_out_of_range_is_one_line(capsys, tmp_path):
    status, out, err = run(capsys, "train-nano", tmp_path, "--seed", 2**64)
    assert (status, out) == (2, "")
    assert "'--seed'" in err
    assert err.count("\n") == 1


def test_nano_commands_match_what_they_call():
    from inkling_ref.nano import evaluate, train

    inspect.signature(evaluate.main).bind("folder", tasks=None, examples=1, precision="both")
    inspect.signature(train.main).bind("folder", minutes=1.0, device=None, seed=0, preset_name=None)


# ---- help


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["ask", "--help"], ["info", "--help"], ["eval-nano", "--help"], ["train-nano", "--help"]],
    ids=" ".join,
)
def test_help(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert status == (0 if arguments else 2)
    assert "Usage: inkling-ref" in out + err
    assert "Traceback" not in out + err


def test_an_unknown_command_is_one_line(capsys):
    status, out, err = run(capsys, "answer")
    assert (status, out) == (2, "")
    assert "answer" in err
    assert err.count("\n") == 1


def test_a_small_model_runs_on_one_thread_unless_the_user_says_otherwise(monkeypatch):
    config, before = InklingConfig.nano(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        cli.use_few_threads(config, "cpu")
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        cli.use_few_threads(InklingConfig.small(), "cpu")
        cli.use_few_threads(config, "cuda")
        assert torch.get_num_threads() == 2
        cli.use_few_threads(config, "cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
