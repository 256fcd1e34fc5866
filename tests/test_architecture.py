"""The shape of the package: which stage imports what, no circles, and nothing too long to read."""

import ast
import inspect
from dataclasses import fields
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import nanscan
from helpers.paths import ROOT
from nanscan._options import Options

FILES = sorted((ROOT / "nanscan").rglob("*.py"))

# What a stage may import besides itself: whole stages, or single files of one. The top of the
# package (_api, _monitor, _options, _replay, __main__, ...) wires the stages and may import all.
ALLOWED = {
    "_data": (),
    "_scan": ("_data",),
    "_collect": ("_data", "_scan"),
    "_judge": ("_data", "_collect.snapshot"),
    "_locate": (
        *("_data", "_scan", "_collect.listener", "_collect.torch_events", "_collect.door"),
        "_collect.names",
    ),
    "_output": ("_data", "_version"),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanscan"):
            named = {f"{node.module}.{alias.name}" for alias in node.names} - {"nanscan._C"}
            found |= (named & NAMES) or ({node.module} & NAMES if named else set())
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & NAMES
    return found - {name_of(path)}


def test_stages_import_only_what_comes_before_them():
    wrong = []
    for path in FILES:
        stage = path.relative_to(ROOT / "nanscan").parts[0]
        for module in imports(path) if stage in ALLOWED else ():
            inner = module.removeprefix("nanscan.")
            allowed = (stage, *ALLOWED[stage])
            if not any(inner == name or inner.startswith(f"{name}.") for name in allowed):
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_no_file_imports_in_a_circle():
    graph = {name_of(path): imports(path) for path in FILES if path.name != "__main__.py"}
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_no_import_is_hidden():
    """Neither behind TYPE_CHECKING nor inside of a function."""
    hidden = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
        guarded = [
            n
            for i in ast.walk(tree)
            if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.unparse(i.test)
            for n in ast.walk(i)
        ]
        hidden += [
            f"{name_of(path)}: {ast.unparse(node)}"
            for node in (*inside, *guarded)
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "nanscan" in ast.unparse(node)
        ]
    assert hidden == []


# Classes that may be longer, and why.
LONGER = {
    "Collector": 358,  # one short handler an event of Listener; splitting it would split the events
    "Registry": 312,  # all that may give a module its name or another one, under one lock
}


def length(node: ast.AST) -> int:
    """Lines of a class or function, its docstring aside."""
    docstring = 0
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        docstring = first.end_lineno - first.lineno + 1
    return node.end_lineno - node.lineno + 1 - docstring


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_is_too_long_to_read(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert length(node) <= LONGER.get(node.name, 300), node.name
        elif isinstance(node, ast.FunctionDef):
            assert length(node) <= 50, node.name


def test_enable_and_watch_have_the_signature_of_the_options():
    enable, watch = inspect.signature(nanscan.enable), inspect.signature(nanscan.watch)
    assert enable.parameters == watch.parameters
    options = {f.name: f.default for f in fields(Options)}
    assert {n: p.default for n, p in enable.parameters.items() if n != "model"} == options


def test_public_names_say_that_they_are_of_the_package():
    modules = {
        name: getattr(nanscan, name).__module__ for name in nanscan.__all__ if name[0] != "_"
    }
    assert set(modules.values()) == {"nanscan"}
