"""The code that a checkpoint carries: the folders of this package as a few flat files.

transformers loads only files that lie side by side, so the modules that a family needs become

- `configuration_<model_type>.py`, the configuration,
- `modeling_<model_type>.py`, all else: the layers of the mechanisms that the configuration asks for,
  and of no others,
- a file for what a function imports only when it is called, as it does GPU kernels.

In a file all modules share their names, so no two of them may give one name to different things.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

from transformers import PreTrainedConfig

from .core.mechanism import mechanisms_of

_ROOT = Path(__file__).parent
_HEAD = "# The part of the package hf_moa that this checkpoint needs.\n\n"
# An older transformers loads this code, too, and fails in it by chance.
MINIMUM = (5, 12)
_CHECK = f"""
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < {MINIMUM}:
    raise ImportError(
        "The code of this checkpoint needs transformers {MINIMUM[0]}.{MINIMUM[1]} or later (got "
        f"{{transformers.__version__}}): pip install --upgrade transformers"
    )
"""


def write_code(config: PreTrainedConfig, folder: str | Path, *, with_model: bool) -> None:
    """Write the code of a configuration's family, and with `with_model` that of its models and of the
    mechanisms that it asks for. (A family from outside the package imports these from it.)"""
    is_ours = Path(inspect.getfile(type(config))).is_relative_to(_ROOT)
    mechanisms = mechanisms_of(config) if is_ours else ()
    code = tuple(path for mechanism in mechanisms for path in mechanism.code)
    files = _flat_files(type(config), with_model, code)  # type: ignore[arg-type]  # a class is hashable
    for name, text in files.items():
        Path(folder, name).write_text(text, encoding="utf-8")


@cache
def _flat_files(
    config_class: type[PreTrainedConfig], with_model: bool, code: tuple[str, ...]
) -> dict[str, str]:
    """Texts of the files by their names; `code` names the modules of mechanisms."""
    start = Path(inspect.getfile(config_class))
    home: dict[Path, str] = {}  # the file that a module goes to; imported modules come first
    _settle(start, f"configuration_{config_class.model_type}", home)
    if with_model:
        for module in (start.with_name("model.py"), *(_ROOT / path for path in code)):
            _settle(module, f"modeling_{config_class.model_type}", home)
        for module in list(home):
            for late in (_target(module, node) for node in _imports(module) if node.col_offset):
                _settle(late, "_".join(late.relative_to(_ROOT).with_suffix("").parts), home)
    files = dict.fromkeys(home.values())
    return {f"{file}.py": _join([m for m in home if home[m] == file], home) for file in files}


def _settle(module: Path, file: str, home: dict[Path, str]) -> None:
    """Have a file take a module, and before it what that needs and no file has yet."""
    if module in home:
        return
    for node in _imports(module):
        if not node.col_offset:
            _settle(_target(module, node), file, home)
    home[module] = file


def _join(modules: list[Path], home: dict[Path, str]) -> str:
    """Modules as one file: first all that they import from others, then each without its imports."""
    imports: dict[str, set[str]] = {}  # names by modules
    given: dict[str, ast.stmt] = {}
    bodies = []
    for module in modules:
        source = module.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in _tree(module).body:
            for name in _names(node):
                other = given.setdefault(name, node)
                if other is not node and ast.unparse(other) != ast.unparse(node):
                    raise RuntimeError(f"{name} of {module} is another module's name, too: rename it.")
        at_top = [n for n in _tree(module).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        for node in {*at_top, *_imports(module)}:
            names = set(map(ast.unparse, node.names))
            origin = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and node.level:
                origin = f".{home[_target(module, node)]}"
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
            if origin == f".{home[module]}":
                continue
            if node.col_offset:
                lines[node.lineno - 1] = f"{' ' * node.col_offset}{_import(origin, names)}"
            else:
                imports.setdefault(origin, set()).update(names)
        docstring = ast.get_docstring(_tree(module), clean=False) or ""
        body = "\n".join(lines[_tree(module).body[0].end_lineno :]).strip()
        words = "\n".join(f"# {line}".rstrip() for line in docstring.strip().splitlines())
        is_ours = module.is_relative_to(_ROOT)
        place = module.relative_to(_ROOT.parent).as_posix() if is_ours else module.name
        bodies.append(f"# {'-' * 20} {place}\n#\n{words}\n\n{body}\n")
    first = _import("__future__", imports.pop("__future__"))
    whole = [f"import {name}" for name in sorted(imports.pop("", ()))]
    some = [_import(origin, names) for origin, names in sorted(imports.items())]
    return _HEAD + "\n".join([first, _CHECK, *whole, *some, "", "", "\n\n".join(bodies)])


def _import(origin: str, names: set[str]) -> str:
    return f"from {origin} import {', '.join(sorted(names))}"


@cache
def _tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


@cache
def _imports(module: Path) -> list[ast.ImportFrom]:
    """A module's imports from this package."""
    return [n for n in ast.walk(_tree(module)) if isinstance(n, ast.ImportFrom) and n.level]


def _target(module: Path, node: ast.ImportFrom) -> Path:
    """The file that a relative import names."""
    if node.module is None:
        raise RuntimeError(f"{module} must import from modules of this package, not the package.")
    return module.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module gives."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
