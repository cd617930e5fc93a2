"""The house rules of DESIGN.md section 5, as functions that return violations (one line each).

`python -m tests.house` prints them, and the files that are longer than they should be. Every import
counts, wherever it stands: at module level, in a function, under TYPE_CHECKING, and as a literal
`import_module("...")`. A type-only import counts because the table is about who may know whom,
not about what runs. Only the torch-free rule, which is about what runs, follows imports that a
plain `import` executes; in the modules it names, an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

NO_SENTENCE = re.compile(r"(See|As|More|Of|By|With|Until|Than|E\.g\.|No matter)\b.*\Z")
"""How a docstring of one line begins that goes on where the name ends, in place of a sentence."""
MAY_BE_NO_SENTENCES = "rayk/serve/protocol.py"  # its docstrings are the API's descriptions, which users see

ANYTHING = frozenset({"*"})

IMPORTS: Mapping[str, frozenset[str]] = {
    package: ANYTHING if row == "*" else frozenset(row.split())
    for package, row in {
        "types": "",
        "parallel": "types",
        "kv": "types parallel",
        # Of types only `files`: where built libraries lie. Of kv only `formats`: what quantised bytes mean,
        # which both sides must read alike.
        "kernels": "types kv",
        "attention": "types parallel kv kernels",
        "models": "types parallel kv kernels attention",
        # These five take of parallel only `shard`: what a rank of an engine holds.
        "transfer": "types parallel kv kernels",
        "sched": "types",
        "metrics": "types",
        "lines": "types",
        # Engines and the reference need its masks, fronts and specs its refusals: all of one library.
        "grammars": "types",
        "costs": "types kv models",
        "traces": "types",
        "engine": "types grammars parallel kv kernels attention models sched metrics costs",
        "handover": "types parallel kv models transfer engine sched metrics offload",
        "reports": "types",
        "specs": "types grammars parallel kv models sched traces",
        "explain": "types parallel kv models transfer specs",
        "actors": "types parallel kv models transfer engine sched metrics specs offload handover lines vllm",
        "offload": "types kv transfer kernels",
        "conformance": "types parallel kv transfer",
        # In vLLM's environment, which has numpy and torch, but none of rayk's other requirements. Of kernels
        # only the digest, of transfer digests and diagnosis.
        # Of conformance only `store` and `vllm_adapter`: what a store of KV is.
        "vllm": "types kv kernels transfer conformance",
        "oracle": "types grammars",
        # Of sched only `arrivals`: an open load is the same to an experiment and to a server.
        "bench": "types sched reports traces",
        "serve": "types grammars actors metrics specs",
        "experiments": (
            "types parallel kv kernels models transfer metrics reports specs actors handover oracle"
        ),
        # The engines' own loop, leader and hand-over run in it. Of explain only `reads`.
        "simulate": (
            "types parallel kv models transfer engine sched handover offload specs costs traces explain"
            " metrics"
        ),
        "planner": "types kv models sched specs costs traces simulate reports experiments",
        "cli": "*",
    }.items()
}
"""package -> the packages it may import (itself always)."""

HOMES: Mapping[str, tuple[str, ...]] = {
    "ray": ("rayk/actors/", "rayk/serve/", "rayk/cli/", "rayk/experiments/", "jobs/"),
    "nixl": ("rayk/transfer/nixl_agent.py",),
    "nixl_cu12": ("rayk/transfer/nixl_agent.py",),
    "nixl_cu13": ("rayk/transfer/nixl_agent.py",),
    "triton": ("rayk/kernels/",),
    "pandas": ("rayk/reports/",),
    "pyarrow": ("rayk/reports/",),
    "plotly": ("rayk/reports/",),
    "transformers": ("rayk/oracle/", "rayk/serve/", "rayk/actors/", "jobs/benchmarks/", "jobs/draft_"),
    "huggingface_hub": ("rayk/models/hub.py", "rayk/oracle/"),
    "tokenizers": ("rayk/oracle/", "rayk/serve/", "rayk/actors/"),
    "pydantic": ("rayk/specs/", "rayk/serve/"),
    "fastapi": ("rayk/serve/",),
    "starlette": ("rayk/serve/",),
    "uvicorn": ("rayk/serve/",),
    "aiohttp": ("rayk/bench/",),
    "prometheus_client": ("rayk/serve/", "rayk/actors/"),
    "vllm": ("rayk/vllm/", "jobs/benchmarks/peer_workers/"),
    "ctranslate2": ("jobs/benchmarks/peer_workers/",),
    "gguf": ("rayk/oracle/", "jobs/benchmarks/peer_workers/"),
    "llguidance": ("rayk/grammars/",),
    "llama_cpp": ("jobs/benchmarks/peer_workers/",),
}
"""heavy package -> the only places that may import it."""
RAY_PRIVATE = ("rayk/actors/ray_private.py",)
"""The home of what Ray has no public name for."""

DISTRIBUTIONS: Mapping[str, str] = {
    "grpc": "grpcio",
    "pydantic_core": "pydantic",  # each release of it wants one release of the other
    "yaml": "pyyaml",
}
"""Module -> what pip calls what it comes in, where that is another name."""
UNDECLARED: Mapping[str, str] = {
    "pytest": "the plugin that imports it is loaded by it",
    "triton": "torch's builds for GPUs bring their own",
    "vllm": "lives in an environment of its own",
}
"""Module -> why no dependency of the package names it."""

TORCH_FREE = (
    "rayk",
    "rayk.types",
    "rayk.parallel.shard",
    "rayk.kv.specs",
    "rayk.kv.fields",
    "rayk.kv.formats",
    "rayk.kv.format_bounds",
    "rayk.kv.layout",
    "rayk.kv.groups",
    "rayk.kv.geometry",
    "rayk.kv.maps",
    "rayk.actors.launch",  # a driver starts Ray before it imports torch
    "rayk.experiments.run",
    "rayk.transfer.plan",
    "rayk.transfer.costs",
    "rayk.transfer.extents",
    "rayk.transfer.options",
    "rayk.transfer.wire_geometry",
    "rayk.transfer.connector",
    "rayk.transfer.draining",
    "rayk.transfer.session",
    "rayk.transfer.lease",
    "rayk.transfer.push_session",
    "rayk.transfer.reservation_state",
    "rayk.sched.recovery",
    "rayk.transfer.valid_prefix",
    "rayk.offload.page_file",
    "rayk.offload.disk_folder",
    "rayk.offload.disk_io",
    "rayk.offload.disk",
    "rayk.conformance.catalog",
    "rayk.conformance.plugin",
    "rayk.conformance.runner",
    "rayk.explain",
    "rayk.models.engine_plan",
    "rayk.models.families",
    "rayk.models.drafters.config",
    "rayk.models.drafters.refusals",
    "rayk.models.config",
    "rayk.models.headers",
    "rayk.models.kv_specs",
    "rayk.models.tensor_parallel",
    "rayk.specs",
    "rayk.metrics",
    "rayk.costs",
    "rayk.traces",
)
"""Modules and packages (with all their modules) that import, and work, without torch."""

WARN_LINES = 400
MAX_LINES = 600


@dataclass(frozen=True)
class Import:
    """One imported name, e.g. `rayk.kv.specs.FullAttentionSpec` of a from-import."""

    name: str
    line: int
    executed: bool
    """Runs when the module is imported: not in a function, not under TYPE_CHECKING."""


def find_imports(path: Path, module: str) -> list[Import]:
    """Every import of a file; `module` is its dotted name, for relative imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    is_package = path.name == "__init__.py"
    return list(_walk(tree, module, is_package, executed=True))


def _walk(node: ast.AST, module: str, is_package: bool, *, executed: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, executed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, module, is_package)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, executed)
        elif isinstance(child, ast.Call) and (name := _literal_import(child)):
            yield Import(name, child.lineno, executed)
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.body:
                yield from _walk_one(statement, module, is_package, executed=False)
            for statement in child.orelse:
                yield from _walk_one(statement, module, is_package, executed=executed)
            continue
        in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, module, is_package, executed=executed and not in_function)


def _walk_one(node: ast.AST, module: str, is_package: bool, *, executed: bool) -> Iterator[Import]:
    yield from _walk(ast.Module([node], []), module, is_package, executed=executed)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*parts, node.module] if node.module else parts)


def _literal_import(call: ast.Call) -> str | None:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in {"import_module", "__import__"} or not call.args:
        return None
    argument = call.args[0]
    return argument.value if isinstance(argument, ast.Constant) else None


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return bool(name == "TYPE_CHECKING")


def python_files(root: Path, *folders: str) -> list[Path]:
    """All Python files under folders of `root`, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """rayk/kv/specs.py -> rayk.kv.specs; rayk/kv/__init__.py -> rayk.kv."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def check_import_table(root: Path) -> list[str]:
    """A package imports only what its row names; `types` only the standard library besides."""
    found = []
    for path in python_files(root, "rayk"):
        module = module_name(root, path)
        where = path.relative_to(root)
        package = module.split(".")[1] if "." in module else ""
        if path.parent == root / "rayk" and path.name != "__init__.py":
            found.append(f"{where}: a module outside the packages of the import table")
            continue
        if package and package not in IMPORTS:
            found.append(f"{where}: package {package} has no row in the import table")
            continue
        for item in find_imports(path, module):
            if problem := _table_problem(package, item):
                found.append(f"{where}:{item.line}: {problem}")
    return found


def _table_problem(package: str, item: Import) -> str | None:
    top, *rest = item.name.split(".")
    if top != "rayk":
        if package == "types" and top not in sys.stdlib_module_names:
            return f"types imports {top}, which is not in the standard library"
        return None
    target = rest[0] if rest else ""
    if package == "":
        # rayk/__init__ offers names of every package, but late.
        lazy_only = item.executed and target not in IMPORTS["types"] | {"types", "__future__"}
        return f"rayk/__init__ imports {item.name} at once instead of late" if lazy_only else None
    allowed = IMPORTS[package]
    if target == package or target in allowed or allowed == ANYTHING:
        return None
    if target not in IMPORTS:
        return f"{package} imports {item.name}: import from the package that defines it"
    return f"{package} may not import {target} ({item.name})"


def check_circles(root: Path) -> list[str]:
    """No file imports itself through others, not even for types alone; rayk/__init__ is asked nothing."""
    files = {module_name(root, path): path for path in python_files(root, "rayk")}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        if module == "rayk":
            continue
        names = [item.name for item in find_imports(path, module)]
        graph[module] = {n if n in files else n.rpartition(".")[0] for n in names} & files.keys() - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " <- ".join(error.args[1])]
    return []


def check_homes(root: Path) -> list[str]:
    """Heavy packages are imported only where they live (tests are free)."""
    found = []
    for path in python_files(root, "rayk", "jobs"):
        where = path.relative_to(root).as_posix()
        for item in find_imports(path, module_name(root, path)):
            package, *names = item.name.split(".")
            is_private = package == "ray" and any(name.startswith("_") for name in names)
            homes = RAY_PRIVATE if is_private else HOMES.get(package)
            if homes is not None and not where.startswith(homes):
                found.append(f"{where}:{item.line}: imports {item.name}; home: {', '.join(homes)}")
    return found


def check_declared(root: Path) -> list[str]:
    """What rayk imports is Python's own, or a dependency in pyproject.toml, maybe of an extra for users."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: of for name, of in project.get("optional-dependencies", {}).items() if name != "dev"}
    declared = {_distribution(text) for of in (project["dependencies"], *extras.values()) for text in of}
    found = []
    for path in python_files(root, "rayk"):
        for item in find_imports(path, module_name(root, path)):
            package = item.name.partition(".")[0]
            wanted = DISTRIBUTIONS.get(package, _distribution(package))
            if wanted not in declared and package not in {"rayk", *sys.stdlib_module_names, *UNDECLARED}:
                found.append(f"{path.relative_to(root)}:{item.line}: {wanted} is not in pyproject.toml")
    return found


def _distribution(text: str) -> str:
    """Return the name of a requirement, as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", text)[0]).lower()


def check_docstrings(root: Path) -> list[str]:
    """Each package says in its __init__ what lives there."""
    found = []
    for folder in sorted({path.parent for path in python_files(root, "rayk")}):
        init = folder / "__init__.py"
        where = init.relative_to(root)
        if not init.is_file():
            found.append(f"{where}: missing")
        elif not ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))):
            found.append(f"{where}: no docstring")
    return found


def check_sentences(root: Path) -> list[str]:
    """No docstring of one line begins as NO_SENTENCE says."""
    found = []
    for path in python_files(root, "rayk"):
        where = str(path.relative_to(root))
        if where == MAY_BE_NO_SENTENCES:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text)), lineno=line) if NO_SENTENCE.match(text):
                    found.append(f"{where}:{line}: no sentence: {text}")
    return found


def check_class_names(root: Path) -> list[str]:
    """No two classes of rayk have one name, nor names that differ by a leading underscore only."""
    places: dict[str, list[str]] = {}
    for path in python_files(root, "rayk"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"{', '.join(where)}: classes called {name}" for name, where in places.items() if len(where) > 1]


def check_lengths(root: Path, max_lines: int = MAX_LINES) -> list[str]:
    """No file of more than `max_lines` lines."""
    found = []
    for path in python_files(root, "rayk", "tests", "jobs"):
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > max_lines:
            found.append(f"{path.relative_to(root)}: {num_lines} lines (limit {max_lines})")
    return found


def torch_free_modules(root: Path, names: Iterable[str] = TORCH_FREE) -> list[str]:
    """The names, and for packages (but not for rayk itself) every module inside."""
    found = []
    for name in names:
        path = root / name.replace(".", "/")
        if path.is_dir() and name != "rayk":
            found += [module_name(root, file) for file in sorted(path.rglob("*.py"))]
        else:
            found.append(name)
    return found


def check_torch_free(root: Path, names: Iterable[str] = TORCH_FREE) -> list[str]:
    """No module of the list imports torch, itself (anywhere) or through what its import runs."""
    files = {module_name(root, path): path for path in python_files(root, "rayk")}
    imports = {module: find_imports(path, module) for module, path in files.items()}
    found = []
    for start in torch_free_modules(root, names):
        if start not in files:
            found.append(f"{start}: listed as free of torch, but does not exist")
            continue
        for item in imports[start]:
            if _is_torch(item) and not item.executed and not _typing_only(files[start], item):
                found.append(f"{start}:{item.line}: imports torch late")
        if chain := _path_to_torch(start, imports):
            found.append(f"{start} imports torch: {' -> '.join(chain)}")
    return found


def _is_torch(item: Import) -> bool:
    return item.name.split(".")[0] == "torch"


def _typing_only(path: Path, item: Import) -> bool:
    """Whether the import stands under TYPE_CHECKING, where it never runs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            last = node.body[-1].end_lineno or node.lineno
            if node.lineno < item.line <= last:
                return True
    return False


def _path_to_torch(start: str, imports: Mapping[str, list[Import]]) -> list[str] | None:
    """The shortest chain of executed imports from a module to torch."""
    queue: list[list[str]] = [[start]]
    seen: set[str] = set()
    while queue:
        chain = queue.pop(0)
        module = chain[-1]
        if module in seen:
            continue
        seen.add(module)
        # Importing a.b.c runs a/__init__ and a.b/__init__ first.
        targets = [module.rpartition(".")[0]] if "." in module else []
        for item in imports[module]:
            if not item.executed:
                continue
            if _is_torch(item):
                return [*chain, f"torch (line {item.line})"]
            targets += [item.name, item.name.rpartition(".")[0]]
        queue += [[*chain, name] for name in targets if name in imports and name not in seen]
    return None


def check_all(root: Path = ROOT) -> list[str]:
    """Every rule."""
    return [
        *check_import_table(root),
        *check_circles(root),
        *check_homes(root),
        *check_declared(root),
        *check_docstrings(root),
        *check_sentences(root),
        *check_class_names(root),
        *check_lengths(root),
        *check_torch_free(root),
    ]


if __name__ == "__main__":
    for line in check_lengths(ROOT, WARN_LINES):
        print(f"note: {line}")
    violations = check_all()
    print("\n".join(violations) or "the house is in order")
    sys.exit(bool(violations))
