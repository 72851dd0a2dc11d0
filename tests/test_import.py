"""What importing the package costs and needs, and which way its modules import each other."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import inkling_ref as ir

PACKAGE = Path(ir.__file__).parent
MODULES = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
# A module imports from earlier lines only.
ORDER = [
    {"errors"},
    {"files", "config"},
    {"residual", "draft_config"},
    {"short_conv", "quantization", "vision"},
    {"attention", "moe"},
    {"backends", "cache"},
    {"model"},
    {"dspark"},
    {"chat", "fused", "tensor_files"},
    {"checkpoint", "decode_step"},
    {"draft_files"},
    {"sampling", "stepping"},
    {"speculative", "draft_step"},
    {"generation"},
    {"cli", "notebook"},
]


def run(code: str) -> str:
    """The output of a new interpreter that sees neither Triton nor a GPU."""
    blocked = "import sys; sys.modules['triton'] = None\n"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", blocked + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    heavy = ["torch", "transformers", "matplotlib", "typer", "rich", "tokenizers", "PIL", "numpy"]
    loaded = run(f"import inkling_ref; print([m for m in {heavy} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_every_name_loads_without_triton_gpu_transformers_or_the_command_line():
    code = "import inkling_ref as ir; [getattr(ir, name) for name in ir.__all__]; "
    code += "print([m for m in ('transformers', 'matplotlib', 'typer') if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_help_and_info_do_not_import_torch():
    for arguments in (["--help"], ["info", "--preset", "small"]):
        code = f"from inkling_ref.cli import main; main({arguments}); print('torch' in sys.modules)"
        assert run(code).splitlines()[-1] == "False"


def test_every_module_but_the_kernels_imports_without_triton_and_gpu():
    names = [".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in PACKAGE.rglob("*.py")]
    names = [name.removesuffix(".__init__") for name in names if not name.startswith("inkling_ref.kernels")]
    run("\n".join(["import importlib", *(f"importlib.import_module({name!r})" for name in sorted(names))]))


@pytest.mark.parametrize("name", ir.__all__)
def test_public_name(name):
    assert getattr(ir, name) is not None
    assert name in dir(ir)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'inkling'"):
        _ = ir.inkling


def test_every_module_has_a_place_in_the_order():
    assert set().union(*ORDER) == set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_downwards_only(name):
    place = next(i for i, names in enumerate(ORDER) if name in names)
    allowed = set().union(*ORDER[:place])
    assert siblings(MODULES[name]) <= allowed


def siblings(path: Path) -> set[str]:
    """The modules of the package that a file imports, those under `if TYPE_CHECKING` apart."""
    found = set()
    for node in ast.walk(_Runtime().visit(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found & set(MODULES)


class _Runtime(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def test_no_module_defers_annotations():
    # Strings instead of types would switch the tests' shape checks off.
    for path in PACKAGE.rglob("*.py"):
        assert "from __future__ import annotations" not in path.read_text(encoding="utf-8"), path


def test_the_readable_core_stays_short():
    core = ["config", "residual", "short_conv", "attention", "moe", "model", "cache"]
    lengths = {name: len(MODULES[name].read_text(encoding="utf-8").splitlines()) for name in core}
    assert sum(lengths.values()) < 1500, lengths
