"""Who may import whom, and what pure code must not do, read from the source itself.

The pure half decides; it must come to the same decision in every process. Each check is also tried on a line that
breaks it, so that a check which finds nothing is known to look.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("engine/**/*.py"))
}

DECIDING = [name for name in SOURCES if name.startswith("engine/scheduler/")]
DECIDING += [name for name in SOURCES if name.startswith("engine/mem_cache/") and "/pool/" not in name]
PURE_ALONE = (
    "types",
    "config",
    "topology",
    "planner",
    "capacity_plan",
    "layer_split",
    "replay",
    "model/spec",
    "model/cache_shapes",
    "mem_cache/sizing",
)
PURE = [*DECIDING, *(f"engine/{name}.py" for name in PURE_ALONE if f"engine/{name}.py" in SOURCES)]
OUTSIDE = {
    "torch",
    "numpy",
    "time",
    "random",
    "secrets",
    "uuid",
    "threading",
    "asyncio",
    "os",
    "socket",
    "datetime",
}
OPEN_TO_ALL = {
    "engine.types",
    "engine.config",
    "engine.topology",
    "engine.mem_cache.sizing",
    "engine.model.spec",
    "engine.model.cache_shapes",
}
MEETING_POINTS = ("engine/stage.py", "engine/leader.py", "engine/llm.py", "engine/replay.py")
PICKLING = ("send_pyobj", "recv_pyobj", "all_gather_object", "gather_object", "scatter_object_list")
PICKLING += ("broadcast_object_list", "send_object_list", "recv_object_list")
FILE_LINES_MAX, FUNCTION_LINES_MAX = 420, 65


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path) for path in SOURCES}
PURE_MODULES = {module_of(path) for path in PURE}


def imports(source: str) -> Iterator[str]:
    """Every module that a source imports, at its top or later."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def is_set(node: ast.expr, sets: set[str]) -> bool:
    """Whether an expression is plainly a set."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    if isinstance(node, ast.BinOp):
        return is_set(node.left, sets) or is_set(node.right, sets)
    return isinstance(node, ast.Set | ast.SetComp) or ast.unparse(node) in sets


def set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that are assigned a set or annotated as one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_set(node.value, names):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            names |= {name} if ast.unparse(node.annotation).startswith(("set", "frozenset")) else set()
    return names


def impurities(source: str, *, deciding: bool) -> list[str]:
    """What a pure source must not hold. `deciding` sources hold no float but in annotations, and no set at all."""
    tree = ast.parse(source)
    sets = set_names(tree)
    found = [f"imports {name}" for name in imports(source) if name.split(".")[0] in OUTSIDE]
    for node in ast.walk(tree):
        iterated: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            iterated = [node.iter]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("hash", "id", "globals", "input", "open"):
                found.append(f"calls {node.func.id}()")
            if node.func.id in (
                "list",
                "tuple",
                "iter",
                "enumerate",
                "zip",
                "max",
                "min",
                "next",
                "map",
                "filter",
            ):
                iterated = list(node.args)
            if deciding and node.func.id == "float":
                found.append("makes a float")
        found += [f"iterates over the set {ast.unparse(node)}" for node in iterated if is_set(node, sets)]
        if deciding and isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append(f"holds the float {node.value}")
        if deciding and isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            found.append("divides with /")
        if deciding and isinstance(node, ast.expr) and not isinstance(node, ast.Name) and is_set(node, set()):
            found.append(f"makes the set {ast.unparse(node)}")
    return found


def unpicklings(source: str) -> list[str]:
    """Ways in which foreign bytes could become code."""
    found = [
        name for name in imports(source) if name.split(".")[0] in ("pickle", "marshal", "shelve", "dill")
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            if node.attr in PICKLING or (node.attr == "load" and ast.unparse(node.value) == "torch"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ):
            found.append(node.func.id)
    return found


# ---- the project ----


@pytest.mark.parametrize("path", PURE)
def test_pure_code_knows_no_clock_no_chance_no_hash_and_no_order_of_a_set(path: str):
    assert impurities(SOURCES[path], deciding=path in DECIDING) == []


@pytest.mark.parametrize("path", PURE)
def test_pure_code_imports_pure_code_only(path: str):
    inside = [name for name in imports(SOURCES[path]) if name.startswith("engine")]
    assert [name for name in inside if name not in PURE_MODULES] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path not in (*PURE, *MEETING_POINTS)])
def test_the_rest_sees_of_the_pure_half_only_what_is_open_to_all(path: str):
    inside = [name for name in imports(SOURCES[path]) if name in PURE_MODULES]
    assert [name for name in inside if name not in OPEN_TO_ALL] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.startswith("engine/frontend/")])
def test_the_front_end_knows_the_wire_and_not_what_is_behind_it(path: str):
    wire = tuple(f"engine.distributed.{name}" for name in ("frames", "links", "launch"))
    found = [name for name in imports(SOURCES[path]) if name.split(".")[0] == "torch"]
    found += [
        name for name in imports(SOURCES[path]) if name.startswith("engine.distributed") and name not in wire
    ]
    assert found == []


@pytest.mark.parametrize("path", [*SOURCES, "server.py"])
def test_no_bytes_become_code(path: str):
    """sglang#21435 and others: nothing that comes from a socket or a file is ever unpickled."""
    source = SOURCES.get(path) or (ROOT / path).read_text()
    assert unpicklings(source) == []


@pytest.mark.parametrize("path", SOURCES)
def test_files_and_functions_fit_the_head(path: str):
    assert SOURCES[path].count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(SOURCES[path])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, f"{node.name} is too long"


@pytest.mark.parametrize(
    "module", ["engine.scheduler.scheduler", "engine.scheduler.sequencer", "engine.frontend.serve"]
)
def test_neither_the_scheduler_nor_the_front_end_loads_torch(module: str):
    code = f"import {module}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---- the checks themselves ----


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from os import path",
        "x = hash('a')",
        "x = id(y)",
        "for x in {1, 2}: pass",
        "x = [y for y in set(z)]",
        "x = set(y)\nfor z in x: pass",
        "def f(x: set[int]):\n    return list(x)",
        "x: set[int] = y\nz = min(x)",
        "for x in y | {1}: pass",
    ],
)
def test_what_no_pure_source_may_hold_is_found(line: str):
    assert impurities(line, deciding=False)


@pytest.mark.parametrize(
    "line", ["x = 1 / 2", "x /= 2", "x = 0.5", "x = float(y)", "x = {1, 2}", "x = y in set(z)"]
)
def test_what_no_deciding_source_may_hold_is_found(line: str):
    assert impurities(line, deciding=True) and not impurities(line, deciding=False)


@pytest.mark.parametrize(
    "line", ["x: float = y", "x = y // 2", "for x in sorted(y): pass", "x = {1: 2}\nfor y in x: pass"]
)
def test_what_is_allowed_is_not_found(line: str):
    assert impurities(line, deciding=True) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "x = torch.load(y)",
        "x = s.recv_pyobj()",
        "dist.broadcast_object_list(x)",
        "dist.all_gather_object(x, y)",
        "np.load(x, allow_pickle=True)",
        "eval(x)",
    ],
)
def test_ways_to_run_foreign_bytes_are_found(line: str):
    assert unpicklings(line)
