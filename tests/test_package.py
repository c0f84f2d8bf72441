# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: lazy, documented, licensed, typed, and buildable."""

from __future__ import annotations

import ast
import collections
import contextlib
import doctest
import importlib
import importlib.metadata
import inspect
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from machine import required
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import deltackpt
from deltackpt import errors
from deltackpt.errors import MissingExtra
from deltackpt.storage import store

REPOSITORY = Path(__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    for path in (REPOSITORY / "deltackpt").rglob("*.py")
)
MADE_BY_TOOLS = {".cache", ".git", ".venv", ".hypothesis", "__pycache__", "build", "dist", "site"}


def source_files(*suffixes: str) -> list[Path]:
    """Files of the source tree, without ignored files and binary goldens."""
    found = []
    for folder, subfolders, names in os.walk(REPOSITORY):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in MADE_BY_TOOLS and not name.endswith(("_cache", ".egg-info"))
        ]
        found += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(found)


def fresh_python(program: str, **settings: str) -> str:
    """The output of a program in a new interpreter; warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **settings},
    ).stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "others"),
    [
        (
            "import deltackpt; dir(deltackpt); deltackpt.errors.Damaged",
            "jax flax optax orbax numpy tensorstore ray",
        ),
        (
            "import deltackpt; deltackpt.CheckpointManager; deltackpt.TouchState;"
            "deltackpt.touched.mark; deltackpt.policies.Consecutive",
            "orbax flax optax tensorstore ray click rich h11 obstore confluent_kafka grain pandas "
            "pyarrow matplotlib deltackpt.tiers.startup deltackpt.storage.node_client "
            "deltackpt.ledger.entries deltackpt.session.restoring deltackpt.reading.stored_saves "
            "deltackpt.wal.recorder deltackpt.format.wal_format deltackpt.codecs.block_codecs",
        ),
        (
            "import deltackpt.layers.merge, deltackpt.codecs, deltackpt.format.chain;"
            "import deltackpt.policies",
            "jax orbax",
        ),
        ("import deltackpt.maintenance.compact", "jax orbax ray flax"),
        ("import deltackpt.inspect", "jax orbax click rich pandas"),
        (
            "from deltackpt import cli; cli.cli(['ls', '--help'], standalone_mode=False)",
            "jax orbax ray tensorstore",
        ),
    ],
    ids=["package", "manager", "merging", "compaction", "inspection", "help"],
)
def test_an_import_loads_what_it_needs_alone(program, others):
    program += f"\nimport sys; print([m for m in {others.split()} if m in sys.modules])"
    assert fresh_python(program).splitlines()[-1] == "[]"


@pytest.mark.processes
def test_a_plain_state_is_saved_and_restored_without_orbax_or_peers(tmp_path):
    program = f"""
import sys, threading, jax.numpy as jnp, numpy as np, deltackpt

class Watch:
    saving, imported = False, []

    def find_spec(self, name, path=None, target=None):
        training = threading.current_thread() is threading.main_thread()
        if self.saving and training and name.startswith("deltackpt."):
            self.imported.append(name)

sys.meta_path.insert(0, watch := Watch())
state = {{"tables": {{"words": jnp.ones((50, 8))}}, "bias": jnp.zeros(3), "step": 1, "none": None}}
touched = deltackpt.touched.init(state["tables"])
tables = deltackpt.Tables(select="tables/*")
options = deltackpt.ManagerOptions(max_to_keep=1, save_interval_steps=1)
with deltackpt.CheckpointManager({str(tmp_path)!r}, handlers={{"embeddings": tables}},
                                 options=options) as manager:
    for step in range(3):
        touched = deltackpt.touched.mark(touched, {{"words": jnp.array([step])}})
        watch.saving = True
        manager.save(step, state, touched=touched, metrics={{"loss": 1.0}})
        watch.saving = False
    manager.wait_until_finished()
    assert not watch.imported, watch.imported
    restored = manager.restore_latest(state)
    bare = manager.restore_latest()
np.testing.assert_array_equal(restored.state["tables"]["words"], state["tables"]["words"])
assert restored.step == bare.step == 2 and bare.state["step"] == restored.state["step"] == 1
unused = "orbax", "flax", "optax", "h11", "deltackpt.tiers.peers"
print([m for m in unused if m in sys.modules])
"""
    assert fresh_python(program).strip() == "[]"


#: Modules below 120 lines that stay, by reason.
SMALL_MODULES = {
    # Orbax records its path in checkpoints.
    "handlers/v0.py",
    # The only list of Orbax's private names.
    "handlers/orbax_private.py",
    # Imported by name, so that what is below imports no Ray.
    "service/discovery.py",
    # The command line and `inspect` share it, and `--help` loads neither numpy nor the stores.
    "inspect/listing.py",
    # What a merge, its plan, its pieces and the readers of single segments share.
    "layers/row_indices.py",
    # A local directory has no journal, and needs only the other one.
    "ledger/bucket_steps.py",
    "ledger/opening.py",
    # A manager without a WAL imports nothing else of the WAL.
    "wal/ended.py",
    # What restores and serving share, which imports no jax.
    "reading/zarr_arrays.py",
    # `doctor` shows directories even if a dependency of the stores is missing.
    "storage/redaction.py",
    # A restore notes the state, and a save compares with it; neither imports the other.
    "session/restored.py",
    # Public: integrations and the test kit.
    "integrations/sparsecore.py",
    "testing/memory_store.py",
    "testing/node_process.py",
    "testing/states.py",
    "testing/stored_chunks.py",
}


def package_files() -> list[Path]:
    return sorted((REPOSITORY / "deltackpt").rglob("*.py"))


@pytest.fixture(scope="module")
def nodes() -> dict[Path, list[ast.AST]]:
    """The syntax of each file of the package: to parse all of them takes a second."""
    return {path: [*ast.walk(ast.parse(path.read_text()))] for path in package_files()}


def test_a_class_name_is_defined_once(nodes):
    found = collections.Counter(
        node.name
        for node in itertools.chain(*nodes.values())
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in found.items() if count > 1} == set()


def test_a_file_name_is_used_once():
    names = [path.name for path in package_files() if not path.name.startswith("__")]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []


def test_small_modules_are_public_or_have_a_reason():
    package = REPOSITORY / "deltackpt"
    small = {
        path.relative_to(package).as_posix()
        for path in package_files()
        # Modules at the top are public.
        if path.parent != package
        and not path.name.startswith("__")
        and len(path.read_text().splitlines()) < 120
    }
    assert small == SMALL_MODULES


#: Where Orbax's own signatures use ``Any``.
ADAPTERS = REPOSITORY / "deltackpt/handlers"
#: Lower it when lines go; annotate new code with real types, or ``object`` for opaque values.
MOST_ANY_LINES = 130


def lines_with_any(nodes: Iterable[ast.AST]) -> set[int]:
    """Lines of code that use ``typing.Any``, without imports, comments and strings."""
    return {
        node.lineno
        for node in nodes
        if (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
    }


def test_few_lines_use_any(nodes):
    source = "from typing import Any  # Any\na: Any = dict[Any, Any]\n'Any'"
    assert lines_with_any(ast.walk(ast.parse(source))) == {2}
    count = sum(
        len(lines_with_any(found)) for path, found in nodes.items() if ADAPTERS not in path.parents
    )
    assert count <= MOST_ANY_LINES


def source_of(module: str) -> str:
    """Text of a module of the package."""
    path = REPOSITORY.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    return (file if file.exists() else path / "__init__.py").read_text()


def test_every_public_name_exists_and_is_documented():
    undocumented = [
        name
        for name in deltackpt.__all__
        if name != "__version__" and not inspect.getdoc(getattr(deltackpt, name))
    ]
    assert undocumented == []
    assert sorted(deltackpt.__all__) == list(deltackpt.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Checkpointer'"):
        deltackpt.Checkpointer  # noqa: B018


def test_names_that_are_imported_when_used_are_listed():
    from deltackpt import interchange

    assert dir(interchange) == sorted(interchange.__all__)


def test_every_module_is_imported():
    for module in MODULES:
        with contextlib.suppress(MissingExtra):
            importlib.import_module(module)


@pytest.mark.parametrize("module", [one for one in MODULES if ">>>" in source_of(one)])
def test_examples_in_docstrings_run(module):
    found = pytest.importorskip(module, exc_type=MissingExtra)
    assert doctest.testmod(found, optionflags=doctest.ELLIPSIS).failed == 0


def test_no_module_has_a_meaningless_name():
    names = {part for module in MODULES for part in module.split(".")}
    assert names.isdisjoint({"utils", "util", "helpers", "helper", "common", "core", "misc"})


#: Settings in which SDKs look for an endpoint, a region and credentials; we read them too.
OF_SDKS = {"AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}
OF_SDKS |= {"AWS_REGION", "TENSORSTORE_GCS_HTTP_URL", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"}


def test_library_code_reads_no_environment_variable_as_a_setting():
    readers = {
        path.name: path.read_text()
        for path in (REPOSITORY / "deltackpt").rglob("*.py")
        if re.search(r"\bos\.(environ|getenv)\b|\benvvar\b|auto_envvar", path.read_text())
    }
    assert [*readers] == ["buckets.py"]
    read = set(re.findall(r'"([A-Z]+_[A-Z0-9_]+)"', readers["buckets.py"]))
    # A secret, which no option may hold.
    assert read - {"NOT_IMPLEMENTED", "DELTACKPT_NODES_TOKEN"} == OF_SDKS


def test_no_condition_is_entered(nodes):
    """An interrupt inside of ``Condition.__enter__``, which is Python code, leaves it locked."""
    entered = []
    for path, found in nodes.items():
        conditions = {
            ast.unparse(target)
            for node in found
            if isinstance(node, ast.Assign) and "threading.Condition(" in ast.unparse(node.value)
            for target in node.targets
        }
        names = {name.rpartition(".")[2] for name in conditions}
        entered += [
            f"{path.name}: {ast.unparse(item.context_expr)}"
            for node in found
            if isinstance(node, ast.With)
            for item in node.items
            if ast.unparse(item.context_expr).rpartition(".")[2] in names
        ]
    assert not entered


def test_no_error_is_swallowed(nodes):
    swallowed = [
        f"{path}:{handler.lineno}"
        for path, found in nodes.items()
        for handler in found
        if isinstance(handler, ast.ExceptHandler)
        and (handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in handler.body)
    ]
    assert swallowed == []


def imports_of(source: str) -> set[str]:
    """Package modules that a source imports, also in functions, but not only for types."""
    found = set()
    inside: list[ast.AST] = [ast.parse(source)]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            inside += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            deeper = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else str(node.module) for each in deeper}
        inside += ast.iter_child_nodes(node)
    return found & set(MODULES)


def in_circles(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Repeatedly removes modules without imports in the graph; returns the remaining graph."""
    left = dict(imports)
    while free := [each for each, found in left.items() if not found & left.keys()]:
        for each in free:
            del left[each]
    return {each: found & left.keys() for each, found in left.items()}


def test_imports_are_acyclic():
    assert in_circles({"a": {"b"}, "b": {"a"}, "c": set()}) == {"a": {"b"}, "b": {"a"}}
    imports = {module: imports_of(source_of(module)) - {module} for module in MODULES}
    assert in_circles(imports) == {}


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def bound_by(scope: ast.AST) -> set[str]:
    """Names that a function or a comprehension binds itself, and no scope within it."""
    if isinstance(scope, COMPREHENSIONS):
        inside: list[ast.AST] = [each.target for each in scope.generators]
    else:
        inside = list(ast.iter_child_nodes(scope))
    names = set()
    while inside:
        node = inside.pop()
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        if not isinstance(node, (*COMPREHENSIONS, *FUNCTIONS)):
            inside += ast.iter_child_nodes(node)
    return names


def read_from_outside(node: ast.AST, bound: set[str]) -> set[str]:
    """Names read in a node, in its inner scopes too, that none of them binds."""
    if isinstance(node, (*COMPREHENSIONS, *FUNCTIONS)):
        bound = bound | bound_by(node)
    if isinstance(node, ast.Name):
        return set() if node.id in bound else {node.id}
    return set().union(*(read_from_outside(each, bound) for each in ast.iter_child_nodes(node)))


def crossed_names(source: str) -> list[tuple[int, set[str]]]:
    """Functions by line, with the outer names that they read and their comprehensions bind."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, FUNCTIONS):
            loops = [each for each in ast.walk(function) if isinstance(each, COMPREHENSIONS)]
            bound = set().union(*map(bound_by, loops))
            if bound and (crossed := bound & read_from_outside(function, set())):
                found.append((function.lineno, crossed))
    return found


def test_no_comprehension_binds_a_name_that_its_function_reads_from_outside():
    # Such a name is unbound on Python 3.12 and 3.13, which run comprehensions in their function.
    program = "def f(a):\n  def g(b):\n    c = [a for a in b]\n    return [a for _ in c]"
    assert crossed_names(program) == [(2, {"a"})]
    found = {
        str(path.relative_to(REPOSITORY)): crossed
        for path in source_files(".py")
        if (crossed := crossed_names(path.read_text()))
    }
    assert found == {}


def test_no_lazy_export_or_module_has_the_name_of_a_submodule():
    """Importing the submodule would replace the export."""
    found = {}
    for path in (REPOSITORY / "deltackpt").rglob("*/__init__.py"):
        text, names = path.read_text(), {one.stem for one in path.parent.iterdir()}
        lazy = re.findall(r"^ *(\w+) = LazyModule\(", text, re.MULTILINE)
        if "attributes(" in text:
            lazy += re.findall(r'"(\w+)"', text)
        if lazy:
            found[path.parent.name] = names.intersection(lazy)
    assert len(found) > 3
    assert not any(found.values()), found


def test_every_source_file_names_its_license():
    bare = [
        str(path.relative_to(REPOSITORY))
        for path in [*source_files(".py", ".sh", ".toml", ".yml", ".c"), REPOSITORY / "Makefile"]
        if "SPDX-License-Identifier: Apache-2.0" not in "\n".join(path.read_text().splitlines()[:2])
    ]
    assert bare == []


def test_no_machine_specific_path_is_in_the_tree():
    own = re.compile(r"(?<![\w.])/(home|root|Users|work)/\w")
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in [
            *source_files(".py", ".md", ".toml", ".yml", ".sh", ".txt"),
            REPOSITORY / "Makefile",
            REPOSITORY / ".ci" / "run",
        ]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if own.search(line) or str(REPOSITORY) in line
    ]
    assert found == []


def test_every_imported_library_is_declared(nodes):
    declared = {
        re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
        for requirement in importlib.metadata.requires("deltackpt") or ()
    }
    imported = set()
    for node in itertools.chain(*nodes.values()):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    providers = importlib.metadata.packages_distributions()
    undeclared = [
        name
        # T5X is not on any package index.
        for name in sorted(imported - sys.stdlib_module_names - {"deltackpt"})
        if not declared & {found.lower().replace("_", "-") for found in providers[name]}
    ]
    assert undeclared == []


def test_every_supported_python_is_tested_with_pins_within_the_ranges():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    supported = SpecifierSet(project["requires-python"])
    pythons = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    named = [re.fullmatch(r".* :: Python :: (3\.\d+)", name) for name in project["classifiers"]]
    assert [match[1] for match in named if match] == pythons
    makefile = (REPOSITORY / "Makefile").read_text()
    [tested] = re.findall(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)
    assert tested.split() == pythons[1:]
    for file in ["constraints.txt", *(f"constraints-{python}.txt" for python in pythons[1:])]:
        lines = (REPOSITORY / file).read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        pins = {canonicalize_name(name): version for name, version in pins.items()}
        for requirement in map(Requirement, project["dependencies"]):
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, file


def tool(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a script of tools/ with a directory first on PATH."""
    return subprocess.run(
        ["sh", f"tools/{arguments[0]}", *arguments[1:]],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{before}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.processes
def test_each_python_gets_its_own_pins(tmp_path):
    version = "{}.{}".format(*sys.version_info)
    own = "constraints.txt" if version == "3.11" else f"constraints-{version}.txt"
    assert tool("pins.sh", sys.executable).stdout == f"{own}\n"
    on_path = tmp_path / f"python{version}"
    on_path.symlink_to(sys.executable)
    assert tool("find_python.sh", version, before=str(tmp_path)).stdout == f"{on_path}\n"


@pytest.mark.processes
def test_a_missing_python_is_a_failure():
    ended = tool("find_python.sh", "3.99")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "expected python3.99 on PATH" in ended.stderr


def test_error_codes_are_unique_and_errors_share_one_base():
    classes = [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert all(issubclass(value, errors.DeltackptError) for value in classes)
    codes = [value.code for value in classes]
    assert sorted(set(codes)) == sorted(codes)


def test_errors_reach_other_processes_whole():
    for kind in [*vars(errors).values(), store.Exists, store.Missing]:
        if inspect.isclass(kind) and issubclass(kind, Exception):
            words = ["found"]
            if inspect.isfunction(kind.__init__):
                every = inspect.signature(kind).parameters.values()
                words = [one.name for one in every if one.kind == one.POSITIONAL_OR_KEYWORD]
            error = kind(*words)
            again = pickle.loads(pickle.dumps(error))
            assert (str(again), vars(again)) == (str(error), vars(error)), kind


def copy_of_sources(target: Path) -> Path:
    """Copies the files that go into the sdist, with new modification times."""
    include = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    target.mkdir()
    names = ["pyproject.toml", "README.md", "LICENSE", ".gitignore"]
    for name in [*names, *include["targets"]["sdist"]["include"]]:
        for path in REPOSITORY.glob(name):
            if path.is_dir():
                made = shutil.ignore_patterns("__pycache__")
                shutil.copytree(
                    path, target / path.name, ignore=made, copy_function=shutil.copyfile
                )
            else:
                shutil.copyfile(path, target / path.name)
    return target


def built(source: Path, *kinds: str, **settings: str) -> list[Path]:
    """Builds a source tree like `python -m build`, without an isolated environment."""
    targets = [argument for kind in kinds for argument in ("-t", kind)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *targets, "-d", "dist"],
        cwd=source,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1767225600", **settings},
    )
    return sorted((source / "dist").iterdir())


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> tuple[Path, Path]:
    """An sdist and a wheel built from a copy of the sources."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    source = copy_of_sources(tmp_path_factory.mktemp("packages") / "source")
    sdist, wheel = sorted(built(source, "sdist", "wheel"), key=lambda path: path.suffix)
    return sdist, wheel


@pytest.mark.processes
def test_wheel_and_sdist_build_reproducibly(packages, tmp_path):
    sdist, wheel = packages
    again = copy_of_sources(tmp_path / "again")
    for path in again.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o700 if path.is_dir() else 0o600)
    for path, other in zip(
        (sdist, wheel), sorted(built(again, "sdist", "wheel"), key=lambda p: p.suffix)
    ):
        assert path.name == other.name and path.read_bytes() == other.read_bytes(), path.name
    # Installing from the sdist builds the same wheel.
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (from_sdist,) = built(unpacked, "wheel")
    assert from_sdist.read_bytes() == wheel.read_bytes()


@pytest.mark.processes
def test_sdist_contains_what_builds_and_tests_need_and_no_wheel(packages):
    with tarfile.open(packages[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "SECURITY.md"} <= names
    assert {"deltackpt/py.typed", "tests/conftest.py", "tools/smoke.py", "mkdocs.yml"} <= names
    assert {"deltackpt/_kernels.c", "hatch_build.py"} <= names
    assert not any(name.endswith((".whl", ".pyc", ".so")) for name in names)


@pytest.mark.processes
def test_wheel_is_typed_complete_and_contains_nothing_else(packages, tmp_path):
    with zipfile.ZipFile(packages[1]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"deltackpt-{deltackpt.__version__}.dist-info/METADATA").decode()
        archive.extractall(tmp_path)
    code = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "deltackpt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".c", ".so")
    }
    assert "deltackpt/py.typed" in names
    if packages[1].name.endswith("py3-none-any.whl"):
        required(False, "no C compiler, or no headers of Python, for deltackpt._kernels")
    assert "-cp311-abi3-" in packages[1].name
    code.add("deltackpt/_kernels.abi3.so")
    assert {name for name in names if ".dist-info/" not in name} == code
    # The twine that uploads a release rejects newer metadata.
    assert metadata.startswith("Metadata-Version: 2.4\n")
    assert "License-Expression: Apache-2.0" in metadata
    assert {"Source", "Issues", "Documentation"} <= set(
        re.findall(r"^Project-URL: (\w+),", metadata, re.MULTILINE)
    )


@pytest.mark.processes
def test_without_a_compiler_the_wheel_is_pure(tmp_path):
    source = copy_of_sources(tmp_path / "source")
    for compiler, setting in (("no-such-compiler", ""), ("cc", "0")):
        (wheel,) = built(source, "wheel", CC=compiler, DELTACKPT_KERNELS=setting)
        assert wheel.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            assert not any(found.endswith(".so") for found in archive.namelist())
    with pytest.raises(subprocess.CalledProcessError) as failed:
        built(source, "wheel", CC="no-such-compiler", DELTACKPT_KERNELS="1")
    assert "no C compiler 'no-such-compiler'" in failed.value.stderr


def test_readme_links_are_absolute():
    # PyPI cannot resolve relative links.
    prose = re.sub(r"```.*?```", "", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    links = [*re.findall(r"\]\(([^)\s]+)", prose), *re.findall(r'(?:src|href)="([^"]+)"', prose)]
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.processes
@pytest.mark.parametrize("version", ["this", "3.12", "3.13"])
def test_installed_wheel_saves_and_restores_outside_the_source_tree(version, packages, tmp_path):
    # `make test-pythons` makes these environments; `make smoke` installs into empty ones.
    python = Path(sys.executable)
    if version != "this":
        python = REPOSITORY / f"build/py{version}/bin/python"
        if not python.exists():
            pytest.skip(f"build/py{version} does not exist: run make test-pythons")
    with zipfile.ZipFile(packages[1]) as archive:
        archive.extractall(tmp_path / "installed")
    shutil.copy(REPOSITORY / "tools" / "smoke.py", tmp_path)
    printed = subprocess.run(
        [python, "smoke.py", tmp_path / "checkpoints"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    ).stdout
    assert f"from {tmp_path / 'installed' / 'deltackpt'}," in printed
    assert printed.endswith("steps (0, 1) restored\n")


def test_extras_resolve_and_are_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [Requirement(text) for texts in extras.values() for text in texts]
    assert {
        name for found in requirements if found.name == "deltackpt" for name in found.extras
    } <= set(extras)
    for file in sorted(REPOSITORY.glob("constraints*.txt")):
        lines = file.read_text().splitlines()
        pins = dict(line.split("==") for line in lines if not line.startswith("#"))
        pins = {canonicalize_name(name): version for name, version in pins.items()}
        for found in requirements:
            if found.name != "deltackpt":
                pin = pins.get(canonicalize_name(found.name))
                assert pin is not None and pin in found.specifier, (file.name, found)


def test_workflows_pin_actions_by_commit():
    uses = [
        line.strip().removeprefix("- ")
        for path in sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
        for line in path.read_text().splitlines()
        if line.strip().removeprefix("- ").startswith("uses:")
    ]
    assert uses
    pinned = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in uses if not pinned.fullmatch(line)] == []


def test_citation_matches_the_package():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = (REPOSITORY / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.MULTILINE))
    assert fields["version"] == deltackpt.__version__
    assert fields["license"] == project["license"]
    assert fields["repository-code"] == project["urls"]["Source"]
    assert fields["url"] == project["urls"]["Documentation"]


SAVE = """
import collections, sys, tempfile, threading
import jax, jax.numpy as jnp
import deltackpt

called = set()

def profile(frame, event, arg):
    name = frame.f_globals.get("__name__", "")
    if event == "call" and name.partition(".")[0] == "deltackpt":
        called.add(name)

threading.setprofile(profile)
state = {"words": jnp.ones((1000, 64)), "bias": jnp.zeros(64)}
handlers = {"embeddings": deltackpt.Tables(select="words")}
with deltackpt.CheckpointManager(tempfile.mkdtemp(), handlers=handlers) as manager:
    for step in (1, 2):
        sys.setprofile(profile if step == 2 else None)
        called.clear()
        manager.save(step, {**state, "words": state["words"].at[step].add(1.0)})
        manager.wait_until_finished()
        sys.setprofile(None)
    assert len(manager.all_steps()) == 2
    threading.setprofile(None)  # Another thread closes the manager.
print("\\n".join(sorted(called)))
"""


@pytest.mark.processes
def test_a_plain_save_calls_functions_of_few_modules():
    """A reader opens them to follow a save."""
    called = fresh_python(SAVE).split()
    assert "deltackpt.save.commit" in called
    assert len(called) <= 40, called
