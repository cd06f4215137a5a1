"""What is installed, what an import pulls in, and that the documents name what there is."""

from __future__ import annotations

import ast
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import tilewise

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("data", "dispatch", "kernels", "models", "service")
# What an import of the selector must do without; each is an extra, or comes with one.
EXTRAS: tuple[str, ...] = (
    "alembic",
    "fastapi",
    "joblib",
    "matplotlib",
    "pandas",
    "prometheus_client",
    "psycopg",
    "pyarrow",
    "pydantic",
    "rich",
    "scipy",
    "sklearn",
    "sqlalchemy",
    "starlette",
)
EXTRAS += ("torch", "triton", "uvicorn")

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not installed (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *, cwd: Path, blocked: tuple[str, ...] = (), path: Path | None = None) -> str:
    """What a fresh interpreter prints for `code` when the packages in `blocked` cannot be imported."""
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    source = BLOCKER.format(blocked=set(blocked)) + code
    done = subprocess.run([sys.executable, "-c", source], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def third_parties(printed: str) -> set[str]:
    """The top-level packages among printed module names that are neither ours nor Python's own."""
    names = {name.partition(".")[0] for name in printed.split()}
    ours = {"tilewise", "__main__", "__mp_main__"}
    return {name for name in names - ours - set(sys.stdlib_module_names) if not name.startswith(("_", "sitecustomize"))}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the package, by its import name."""
    paths = [path for path in root.glob("*.py") if path.name != "setup.py"]
    paths += [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return {
        ".".join(["tilewise", *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__"): path
        for path in paths
    }


def imports(path: Path) -> set[str]:
    """The tilewise modules that a file imports, anywhere in it but for type checkers."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(child) for node in typing_only for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("tilewise")}


# --- what an import does


def test_import_needs_no_extra_and_loads_none(tmp_path: Path) -> None:
    loaded = "import tilewise; print(*sys.modules)"
    assert third_parties(python(loaded, cwd=tmp_path, blocked=EXTRAS)) <= {"numpy"}
    # And where the extras are installed, they stay unloaded: an optional import on the quiet would cost seconds.
    baseline = third_parties(python("print(*sys.modules)", cwd=tmp_path))
    assert third_parties(python(loaded, cwd=tmp_path)) - baseline <= {"numpy"}


def test_shape_and_config_need_numpy_at_most(tmp_path: Path) -> None:
    printed = python(
        "import tilewise; tilewise.Shape, tilewise.Config, tilewise.Arch; print(*sys.modules)", cwd=tmp_path
    )
    baseline = third_parties(python("print(*sys.modules)", cwd=tmp_path))
    assert third_parties(printed) - baseline <= {"numpy"}


def test_select_works_with_numpy_alone(tmp_path: Path) -> None:
    code = """
import tilewise
shape = tilewise.Shape(batch_size=16, next_n=6, heads=32, head_dim=128, block_kv=64, max_context_len=131072)
decision = tilewise.select(shape, arch="h200")
print(type(decision.config).__name__, decision.source)
"""
    name, source = python(code, cwd=tmp_path, blocked=EXTRAS).split()
    assert name == "Config"
    assert source in ("exact", "model", "nearest", "prior", "default")


def test_data_and_specs_load_no_torch(tmp_path: Path) -> None:
    names = [name for name in modules() if name.startswith("tilewise.data") or name.endswith(".spec")]
    names += ["tilewise.kernels.arch", "tilewise.kernels.registry", "tilewise.errors"]
    assert "tilewise.kernels.paged_mqa_logits.spec" in names
    code = f"import importlib\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    assert not third_parties(python(code, cwd=tmp_path)) & {"torch", "triton"}


# Each layer, and the layers it must not know of. Numbers flow kernels -> data -> models -> dispatch -> server.
UPWARD = {
    "kernels": ("data", "models", "dispatch", "service", "server", "cli"),
    "data": ("models", "dispatch", "service", "server", "cli"),
    "models": ("dispatch", "service", "server", "cli"),
    "dispatch": ("service", "server", "cli"),
    "service": ("server", "cli"),
}
# The measuring harness writes profiles; the op without a config asks the selector, when it is called.
ALLOWED = {
    "tilewise.kernels.collect": ("data",),
    "tilewise.kernels.paged_mqa_logits.launch": ("dispatch",),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_one_way(folder: str) -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if name.split(".")[1:2] == [folder]
        for imported in sorted(imports(path))
        for layer in UPWARD[folder]
        if imported.split(".")[1:2] == [layer] and layer not in ALLOWED.get(name, ())
    ]
    assert not wrong


# --- what is built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout as a clone has it: no build outputs, no environments."""
    target = tmp_path_factory.mktemp("checkout") / "tilewise-src"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


def pip(*arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def build_wheel(source: Path, out: Path) -> Path:
    """Built with the setuptools of this environment, so without the network."""
    pip(
        "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source), cwd=out.parent
    )
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel") / "out")


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
    expected = {f"tilewise/{path.relative_to(checkout)}" for path in modules(checkout).values()} | {"tilewise/py.typed"}
    shipped = (
        "data/profiles/*/*.parquet",
        "data/published/*",
        "data/audit/*",
        "data/peers/*",
        "models/fitted/**/*",
        "service/dashboard/*",
    )
    for pattern in shipped:
        expected |= {f"tilewise/{path.relative_to(checkout)}" for path in checkout.glob(pattern) if path.is_file()}
    assert contents(wheel) == expected


def test_every_folder_of_the_package_has_an_init() -> None:
    folders = {path.parent for path in modules().values()}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()]


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        (scripts,) = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
        assert "tilewise = tilewise.cli:main" in archive.read(scripts).decode()
    assert metadata["Name"] == "tilewise"
    assert metadata["Version"] == tilewise.__version__
    assert metadata["License-Expression"] == "MIT"
    required = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    always = [line for line in required if "extra ==" not in line]
    assert [re.split(r"[<>=!~; ]", line)[0] for line in always] == ["numpy"]
    names = {re.split(r"[<>=!~;\[ ]", line)[0] for line in required}
    assert {"scikit-learn", "fastapi", "torch", "triton"} <= names
    # On PyPI, `aiter` is another project; AMD's comes with its images.
    assert "aiter" not in names


def test_nothing_installs_aiter_or_deep_gemm() -> None:
    installers = [
        ROOT / "Makefile",
        ROOT / ".ci" / "run",
        *sorted((ROOT / "scripts").iterdir()),
        *ROOT.glob("*requirements*"),
    ]
    lines = [line for path in installers if path.is_file() for line in path.read_text("utf-8").splitlines()]
    lines += re.findall(r".*pip install.*", (ROOT / "README.md").read_text("utf-8"))
    assert not [line for line in lines if re.search(r"\b(aiter|deep[-_]gemm)\b", line)]


def test_sdist_is_enough_to_build_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked")  # our own; `filter` came with Python 3.11.4
    (source,) = (tmp_path / "unpacked").iterdir()
    assert contents(build_wheel(source, tmp_path / "out")) == contents(wheel)


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel), cwd=tmp_path)
    code = "import tilewise; from tilewise.kernels.registry import KERNELS, kernel_source_hash as h\n"
    code += "print(tilewise.__file__, *(h(name) for name in KERNELS))"
    file, *hashes = python(code, cwd=tmp_path, path=tmp_path / "site").split()
    assert Path(file) == tmp_path / "site" / "tilewise" / "__init__.py"
    from tilewise.kernels.registry import KERNELS, kernel_source_hash

    assert hashes == [kernel_source_hash(name) for name in KERNELS]


def test_editable_install_sees_new_modules(checkout: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    # pip, setuptools and numpy from here; a path file does not bring along this environment's own editable tilewise.
    (site / "parent.pth").write_text(str(Path(pytest.__file__).parents[1]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        command = [str(tmp_path / "env" / "bin" / "python"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run("-m", "pip", "--disable-pip-version-check", "install", *offline, "-e", str(checkout))
    added = checkout / "kernels" / "added_later.py"
    added.write_text("HERE = 1\n")
    printed = run("-c", "import tilewise, tilewise.kernels.added_later; print(tilewise.__file__)")
    added.unlink()
    assert Path(printed.strip()) == checkout / "__init__.py"


# --- the kept results of GPU test runs


@pytest.fixture(scope="module")
def gpu_test() -> ModuleType:
    spec = spec_from_file_location("gpu_test", ROOT / "scripts" / "gpu_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arch", "totals", "portable_hash", "expected"),
    [
        ("h200", {"passed": 3}, "current", []),
        ("h200", {"passed": 3, "skipped": 1}, "current", []),
        ("h200", {"passed": 3, "failed": 1}, "current", ["not a green run"]),
        ("h200", {"skipped": 3}, "current", ["not a green run"]),
        ("h200", {"passed": 3}, None, ["kernel portable was not tested"]),
        ("h200", {"passed": 3}, "0" * 16, ["kernel portable has changed since 2026-01-01"]),
        ("h100", {"passed": 3}, "current", ["the file holds a result of h100"]),
    ],
)
def test_stale_gpu_results_are_found(
    gpu_test: ModuleType,
    tmp_path: Path,
    arch: str,
    totals: dict[str, int],
    portable_hash: str | None,
    expected: list[str],
) -> None:
    kernels = gpu_test.kernel_hashes("sm90")
    if portable_hash is None:
        del kernels["portable"]
    elif portable_hash != "current":
        kernels["portable"] = portable_hash
    result = {"arch": arch, "date": "2026-01-01", "totals": totals, "kernels": kernels}
    (tmp_path / "h200.json").write_text(json.dumps(result))
    problems = gpu_test.find_problems(tmp_path, tmp_path / "no-profiles")
    assert len(problems) == len(expected)
    assert all(words in problem for words, problem in zip(expected, problems, strict=True))


def test_measured_gpu_without_a_gpu_test_is_found(gpu_test: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "profiles" / "paged_mqa_logits").mkdir(parents=True)
    (tmp_path / "profiles" / "paged_mqa_logits" / "h200.parquet").touch()
    (problem,) = gpu_test.find_problems(tmp_path, tmp_path / "profiles")
    assert problem.startswith("h200 has a shipped profile")


# --- what the documents say


def documents() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    )


def test_exported_names_are_the_documented_ones() -> None:
    section = re.search(r"^## Public names$(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    assert section, "README.md needs a section '## Public names'"
    documented = set(re.findall(r"^\| `tilewise\.(\w+)", section[1], re.M))
    assert documented == set(tilewise.__all__)


def test_every_public_name_resolves() -> None:
    pytest.importorskip("torch")
    for name in tilewise.__all__:
        assert getattr(tilewise, name) is not None
    assert set(dir(tilewise)) == set(tilewise.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        tilewise.nothing  # noqa: B018


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.M))


def test_every_make_target_in_the_documents_exists() -> None:
    mentioned = set(re.findall(r"`make ([a-z][\w-]*)", documents()))
    for block in re.findall(r"^```.*?^```", documents(), re.M | re.S):
        mentioned |= set(re.findall(r"^make ([a-z][\w-]*)", block, re.M))
    assert {"run", "test", "check", "gpu-test"} <= mentioned
    assert mentioned <= make_targets()


def test_make_help_names_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(re.findall(r"^make ([a-z][\w-]*)", done.stdout, re.M)) == make_targets() - {"help", "env", "test-env"}


def test_every_command_is_documented() -> None:
    import argparse

    from tilewise.cli import build_parser

    (commands,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    text = documents()
    # As a heading, in code, or at the start of a line of a shell block.
    assert not [name for name in commands.choices if not re.search(rf"(`|^#+ |^\$? *)tilewise {name}\b", text, re.M)]
