"""What README.md promises: its Python runs, its links and its file tree are there, its options exist."""

import re
from pathlib import Path

import pytest
import typer

from inkling_ref import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Of the table of commands, whose rows name their options.
COMMANDS = re.findall(r"^\| `inkling-ref ([a-z-]+)", README, re.MULTILINE)


def test_the_python_example_answers(monkeypatch, capsys):
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "ir.generate" in code)
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "red\n"


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_file_tree_is_there():
    (tree,) = re.findall(r"## The files\n\n```\n(.*?)```", README, re.DOTALL)
    top, package = tree.split("inkling_ref/\n")
    names = [name for line in top.splitlines() for name in re.split(r"\s{2,}", line)[:-1]]
    names = [name for group in names for name in group.split()]
    names += [f"inkling_ref/{line.split()[0]}" for line in package.splitlines()]
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).exists()] == []
    modules = {path.name for path in (ROOT / "inkling_ref").glob("*.py")}
    assert modules <= {Path(name).name for name in names}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_exist(command):
    row = "\n".join(line for line in README.splitlines() if line.startswith(f"| `inkling-ref {command}"))
    options = {o for p in typer.main.get_command(cli.app).commands[command].params for o in p.opts}
    assert set(re.findall(r"--[a-z-]+", row)) <= options


def test_every_command_is_in_the_table():
    assert set(COMMANDS) == set(typer.main.get_command(cli.app).commands)
