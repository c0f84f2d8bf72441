# SPDX-License-Identifier: Apache-2.0
"""Hand-made records with correct checksums: a typed error, quickly, in little memory.

Most tests decode a record, replace a value, and re-encode the record and the digests over it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from golden import make_golden
from hypothesis import HealthCheck, given, settings
from test_compact import contents, run_compaction, write_chain

import deltackpt.inspect
from deltackpt.errors import Damaged, DeltackptError
from deltackpt.format import manifest, naming
from deltackpt.ledger import directory
from deltackpt.maintenance import verify
from deltackpt.reading import chains, reader
from deltackpt.storage import digests
from deltackpt.tiers import copy

GOLDEN = Path(make_golden.__file__).parent
STEPS = (0, 1, 2)
MANIFEST = f"embeddings/{naming.manifest_name(0)}"
DIGESTS = f"embeddings/{naming.digests_name(0)}"
LAYER = f"embeddings/{naming.layer_name(0)}"
#: Memory limit for readers of a directory of a few kilobytes.
MOST_BYTES = 256 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Directories of a base and two deltas, by kind."""
    place = tmp_path_factory.mktemp("written")
    found = {name: place / name for name in ("raw", "lossy", "shards")}
    write_chain(found["raw"], len(STEPS))
    run_compaction(found["raw"], 1)
    lossy = {"codec": "adaptive4", "slot_codec": "lossless", "always": ("accumulator",)}
    write_chain(found["lossy"], len(STEPS), **lossy)
    for step in make_golden.STEPS:
        shutil.copytree(GOLDEN / "shards-v1" / str(step), found["shards"] / str(step))
    return found


def copied(root_dir: Path, to: Path) -> Path:
    return Path(shutil.copytree(root_dir, to))


pytestmark = pytest.mark.usefixtures("nobody_removes_steps")


def body_of(path: Path) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.unpackb(path.read_bytes())["body"])


def write_body(path: Path, body: Any) -> None:
    """Writes a record with a correct checksum."""
    head = msgpack.unpackb(path.read_bytes())
    head["body"] = msgpack.packb(body)
    head["crc32c"] = google_crc32c.value(head["body"])
    path.write_bytes(msgpack.packb(head))


def cover(step_dir: Path, path: Path) -> None:
    """Updates the checksums that cover a changed record."""
    if path.name.startswith("digests.") and path.parent != step_dir:
        covering = path.with_name(path.name.replace("digests", "manifest"))
        crc = google_crc32c.value(path.read_bytes())
        with contextlib.suppress(TypeError):  # It may be invalid itself.
            write_body(covering, {**body_of(covering), "item_digests_crc32c": crc})
        cover(step_dir, covering)
    above = step_dir / naming.STEP_DIGESTS
    if path != above and above.exists():
        body = body_of(above)
        body["files"][path.relative_to(step_dir).as_posix()] = digests.digest_file(path)[:3]
        write_body(above, body)


def change(root_dir: Path, step: int, name: str, replace: Callable[[Any], Any]) -> None:
    """Changes a record of a step and updates its checksums."""
    path = root_dir / str(step) / name
    body = body_of(path)
    replaced = replace(body)
    write_body(path, body if replaced is None else replaced)
    cover(root_dir / str(step), path)


def at(*path: Any, to: Any) -> Callable[[Any], None]:
    """Returns a function that sets the value at a path of a record."""

    def replace(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return replace


def every_reader(root_dir: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """All readers of a directory that do not need jax."""
    yield "verify", lambda: verify.verify_root(root_dir)
    opened = directory.Root.open(root_dir, read_only=True)
    for step in sorted(opened.steps()):
        path = root_dir / str(step)
        yield "restore", lambda path=path: reader.restore_tables(chains.read_chain(path))
        yield "check", lambda path=path: opened.check_step_files(path)
        yield "inspect", lambda step=step: inspected(root_dir, step)
    yield "copy", lambda: copy.copy(root_dir, root_dir.parent / "copied", all_steps=True)
    yield "list", lambda: [save.rows for save in deltackpt.inspect.open(root_dir).saves]


def inspected(root_dir: Path, step: int) -> None:
    opened = deltackpt.inspect.open(root_dir, item="embeddings")
    found = opened.at(step)
    for table in found.tables.values():
        for field in table.leaves:
            table.field(field)[:2]
    for leaf in found.dense.values():
        _ = leaf.value
    opened.touched(step)
    opened.history(next(iter(found.tables)), [0, 1])
    opened.diff(opened.steps[0], step)


def read_all(root_dir: Path, *means: str) -> list[DeltackptError]:
    """Reads a directory with all readers, or with some; returns the errors, which are all typed."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, read in every_reader(root_dir):
            if means and name not in means:
                continue
            try:
                read()
            except DeltackptError as error:
                found.append(error)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    shutil.rmtree(root_dir.parent / "copied", ignore_errors=True)
    return found


@contextlib.contextmanager
def little_memory(most: int = MOST_BYTES) -> Iterator[None]:
    """Asserts that the block uses little memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


HUGE = 2**45
CASES: dict[str, tuple[int, str, Callable[[Any], Any]]] = {
    "no chunk rows": (0, MANIFEST, at("segments", 0, "arrays", 0, "chunk_rows", to=0)),
    "negative chunk rows": (0, MANIFEST, at("segments", 0, "arrays", 0, "chunk_rows", to=-1)),
    "chunks of one row": (0, MANIFEST, at("segments", 0, "arrays", 0, "chunk_rows", to=1)),
    "huge chunks": (0, MANIFEST, at("segments", 0, "arrays", 0, "chunk_rows", to=2**50)),
    "huge shape": (0, MANIFEST, at("segments", 0, "arrays", 0, "shape", 0, to=HUGE)),
    "negative shape": (0, MANIFEST, at("segments", 0, "arrays", 0, "shape", 0, to=-5)),
    "no shape": (0, MANIFEST, at("segments", 0, "arrays", 0, "shape", to=[])),
    "object": (0, MANIFEST, at("segments", 0, "arrays", 0, "dtype", to="object")),
    "structured": (0, MANIFEST, at("groups", 0, "fields", 0, "dtype", to="f4,f4")),
    "object of a field": (0, MANIFEST, at("groups", 0, "fields", 0, "dtype", to="object")),
    "another dtype": (0, MANIFEST, at("groups", 0, "fields", 0, "dtype", to="int64")),
    "huge rows": (0, MANIFEST, at("groups", 0, "rows", to=2**50)),
    "huge table": (0, MANIFEST, at("tables", 0, "rows", to=2**50)),
    "no rows": (0, MANIFEST, at("groups", 0, "rows", to=0)),
    "offset": (0, MANIFEST, at("tables", 0, "offset", to=3)),
    "no fields": (0, MANIFEST, at("groups", 0, "fields", to=[])),
    "no groups": (0, MANIFEST, at("groups", to=[])),
    "no tables": (0, MANIFEST, at("tables", to=[])),
    "another group": (0, MANIFEST, at("segments", 0, "group", to="g9")),
    "trailing": (0, MANIFEST, at("groups", 0, "fields", 0, "trailing", to=[2**50])),
    "many axes": (0, MANIFEST, at("groups", 0, "fields", 0, "trailing", to=[1] * 99)),
    "huge count": (0, MANIFEST, at("segments", 0, "count", to=2**62)),
    "huge ranges": (0, MANIFEST, at("segments", 0, "ranges", to=[[0, 2**62]])),
    "ranges back": (0, MANIFEST, at("segments", 0, "ranges", to=[[5, 2]])),
    "columns back": (0, MANIFEST, at("segments", 0, "columns", to=[4, 2])),
    "segment above": (0, MANIFEST, at("segments", 0, "name", to="../..")),
    "segment elsewhere": (0, MANIFEST, at("segments", 0, "name", to="/etc")),
    "array above": (0, MANIFEST, at("segments", 0, "arrays", 0, "name", to="..")),
    "parent above": (1, MANIFEST, at("parent", "step_dir", to="../../1")),
    "run above": (1, MANIFEST, at("save_id", "run", to="../..")),
    "huge step": (1, MANIFEST, at("save_id", "step", to=2**64 - 1)),
    "huge process count": (0, MANIFEST, at("process_count", to=2**60)),
    "another process": (0, MANIFEST, at("process", to=1)),
    "no figures": (1, MANIFEST, at("segments", 0, "encodings", 0, "rows", to=[])),
    "long list": (0, MANIFEST, at("dense", 0, "path", to=[["seq", 2**50]])),
    "lists": (0, MANIFEST, at("dense", 0, "path", to=[["seq", "x"]])),
    "a map as a key": (0, MANIFEST, at("dense", 0, "path", to=[["dict", {}]])),
    "no map": (0, MANIFEST, lambda body: []),
    "nothing": (0, MANIFEST, lambda body: {}),
    "no version": (0, MANIFEST, at("format_version", to="1")),
    "features": (0, MANIFEST, at("features", to=[[]])),
    "file above": (0, DIGESTS, at("files", "../x", to=[1, 2, 3])),
    "file elsewhere": (0, DIGESTS, at("files", "/etc/passwd", to=[1, 2, 3])),
    "nul": (0, DIGESTS, at("files", "a\0b", to=[1, 2, 3])),
    "long name": (0, DIGESTS, at("files", "a" * 300, to=[1, 2, 3])),
    "short digest": (0, DIGESTS, at("files", "x", to=[1, 2])),
    "no files": (0, DIGESTS, at("files", to={})),
    "no block bytes": (0, DIGESTS, at("block_bytes", to=0)),
    "itself": (0, naming.STEP_DIGESTS, at("files", naming.STEP_DIGESTS, to=[1, 2, 3])),
    "one another": (0, naming.STEP_DIGESTS, at("files", "digests.step.1.msgpack", to=[1, 2, 3])),
    "file of a delta above": (1, MANIFEST, at("files", "../x", to=[1, 2, 3])),
    "short digest in a delta": (1, MANIFEST, at("files", "x", to=[1, 2])),
    "impossible digest in a delta": (1, MANIFEST, at("files", "x", to=[1, 2**33, 3])),
    "no files of a delta": (1, MANIFEST, at("files", to={})),
    "another digest in a delta": (1, MANIFEST, at("files", naming.STEP_METADATA, to=[1, 2, 3])),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hand_made_record_is_damage_to_every_reader(case, written, tmp_path):
    root_dir = copied(written["raw"], tmp_path / "root")
    step, name, replace = CASES[case]
    shutil.rmtree(root_dir / "compacted")
    change(root_dir, step, name, replace)
    with little_memory():
        errors = read_all(root_dir)
    assert not verify.verify_root(root_dir).intact
    # Only reads of the whole state or of the dense leaves use these.
    assert errors or name == naming.STEP_DIGESTS or case == "long list"
    if step == 1:
        assert contents(root_dir, 0) == contents(written["raw"], 0)


def run_program(program: str, *paths: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr[-2000:]


def test_records_are_decoded_without_the_compiled_part_of_msgpack(written, monkeypatch):
    """msgpack installs without it where no compiler is, and then checks limits in other places."""
    monkeypatch.setenv("MSGPACK_PUREPYTHON", "1")
    program = """
import sys, msgpack
from deltackpt.format import manifest
assert msgpack.Unpacker.__module__ == "msgpack.fallback"
with open(sys.argv[1], "rb") as file:
    assert manifest.from_bytes(file.read(), name="a manifest").kind == "base"
"""
    run_program(program, written["raw"] / "0" / MANIFEST)


LIMITED = """
import resource, sys, warnings
from pathlib import Path
import test_hostile_records as t
warnings.simplefilter("ignore")
from deltackpt.reading import stored_saves
from deltackpt.maintenance import verify
stored_saves._GONE_CHECKS = verify._CHECKS = 1
sound, hostile = map(Path, sys.argv[1:])
assert not t.read_all(sound)  # Threads and libraries have their memory.
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + t.MOST_BYTES,) * 2)
for directory in sorted(hostile.iterdir()):
    if not t.read_all(directory):
        assert not t.verify.verify_root(directory).intact, directory
"""


@pytest.mark.processes
def test_hand_made_records_of_huge_tables_take_little_memory(written, tmp_path):
    """Digests and files match the record; only the lack of memory stops the read."""
    hostile = tmp_path / "hostile"
    for case, (step, name, replace) in CASES.items():
        if case.startswith(("huge", "long", "many", "trailing", "no ")):
            change(copied(written["raw"], hostile / case), step, name, replace)
    make_huge(copied(written["raw"], hostile / "consistent"))
    run_program(LIMITED, copied(written["raw"], tmp_path / "sound"), hostile)


def make_huge(root_dir: Path, rows: int = 2**40) -> None:
    """Makes a base whose manifest, digests and file lengths all claim huge tables."""
    for name in ("1", "2", "compacted"):
        shutil.rmtree(root_dir / name)
    lengths: dict[str, int] = {}

    def grow(body: Any) -> None:
        (segment,) = (one for one in body["segments"] if one["group"] == "g0")
        group = next(one for one in body["groups"] if one["name"] == "g0")
        names = [table for table in body["tables"] if table["group"] == "g0"]
        body["tables"] = [table for table in body["tables"] if table not in names[1:]]
        names[0]["rows"] = group["rows"] = segment["count"] = rows
        segment["ranges"] = [[0, rows]]
        for encoding in segment["encodings"]:
            for figures in ("rows", "squared_error", "squared_norm"):
                encoding[figures] = encoding[figures][:1]
        for entry in segment["arrays"]:
            entry["shape"][0], entry["chunk_rows"] = rows, rows // 4
            row_bytes = np.dtype(entry["dtype"]).itemsize * int(np.prod(entry["shape"][1:]))
            lengths[f"shard.0/{segment['name']}/{entry['name']}/c."] = rows // 4 * row_bytes + 4

    def lengthen(body: Any) -> None:
        for below, length in lengths.items():
            for name in [name for name in body["files"] if name.startswith(below)]:
                body["blocks"].pop(name, None)
                sums = body["files"].pop(name)[1:]
                for chunk in "0123":
                    path = below + chunk + name.removeprefix(below)[1:]
                    body["files"][path] = [length, *sums]

    change(root_dir, 0, MANIFEST, grow)
    change(root_dir, 0, DIGESTS, lengthen)


def test_a_huge_sparse_file_is_a_typed_error(written, tmp_path):
    """A sparse file costs nothing, but reading all of it would never finish."""
    for place in (f"2/{MANIFEST}", f"2/{LAYER}", f"0/{naming.STEP_DIGESTS}"):
        root_dir = copied(written["raw"], tmp_path / place.replace("/", "."))
        os.truncate(root_dir / place, 2**42)
        assert read_all(root_dir)
        assert contents(root_dir, 1) == contents(written["raw"], 1)


def test_a_pipe_in_place_of_a_file_does_not_block_readers(written, tmp_path):
    for place in (f"2/{MANIFEST}", f"2/{LAYER}", f"0/{DIGESTS}", "0/chunk"):
        root_dir = copied(written["raw"], tmp_path / place.replace("/", "."))
        path = root_dir / place
        if path.name == "chunk":
            path = next(p for p in sorted(root_dir.glob("0/**/c.*")) if p.is_file())
        path.unlink()
        os.mkfifo(path)
        assert read_all(root_dir)


HOSTILE = (
    st.sampled_from([-(2**63), -1, 0, 1, 2, 7, 2**31, 2**32, HUGE, 2**50, 2**63 - 1, 2**64 - 1])
    | st.sampled_from([0.0, -1.0, float("nan"), float("inf"), 1e300])
    | st.sampled_from(["", ".", "..", "/", "../..", "/etc/passwd", "a/b", "a\0b", "x" * 300, "é"])
    | st.sampled_from(["object", "O", "float32", "int64", "raw", "int8", "bf16", "lossless", "g1"])
    | st.sampled_from([None, True, False, b"", b"\xff" * 9])
    | st.sampled_from([[], {}, [[]], [0], [-1, 2], [2**50, 2**50], [[0, 2**60]], {"a": 1}])
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a record."""
    if above:
        yield above
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*above, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from places(inner, (*above, number))


def step_records(root_dir: Path) -> list[Path]:
    """All records of all steps and compacted bases."""
    return sorted(path for path in root_dir.rglob("*.msgpack") if path.parent != root_dir)


def unit_of(root_dir: Path, path: Path) -> Path:
    """The step or the folder ``compacted/<step>`` that contains a record."""
    pieces = path.relative_to(root_dir).parts
    return root_dir.joinpath(*pieces[: 2 if pieces[0] == naming.COMPACTED else 1])


@contextlib.contextmanager
def replaced(root_dir: Path) -> Iterator[None]:
    """Restores all records on exit."""
    before = {path: path.read_bytes() for path in step_records(root_dir)}
    try:
        yield
    finally:
        for path, data in before.items():
            path.write_bytes(data)


FUZZED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG = (pytest.mark.long, pytest.mark.timeout(900))
few_or_many = pytest.mark.parametrize("examples", [12, pytest.param(60, marks=LONG)])


@pytest.fixture(scope="module", params=["raw", "lossy", "shards"])
def fuzzed(written, request, tmp_path_factory) -> Path:
    return copied(written[request.param], tmp_path_factory.mktemp("fuzzed") / request.param)


@few_or_many
def test_readers_survive_any_value_in_a_record(fuzzed, examples):
    @settings(FUZZED, max_examples=examples)
    @given(data=st.data())
    def change_values(data):
        """Changes some values of records, with correct checksums, and reads the directory."""
        with replaced(fuzzed):
            for _ in range(data.draw(st.integers(1, 3))):
                path = data.draw(st.sampled_from(step_records(fuzzed)))
                body = body_of(path)
                if not isinstance(body, dict) or not body:
                    continue
                found = list(places(body))
                place = data.draw(st.sampled_from(found))
                value = data.draw(HOSTILE)
                if data.draw(st.booleans()):  # A value from elsewhere in the record.
                    value = body
                    for key in data.draw(st.sampled_from(found)):
                        value = value[key]
                    value = msgpack.unpackb(msgpack.packb(value))
                at(*place, to=value)(body)
                write_body(path, body)
                with contextlib.suppress(TypeError, KeyError, AttributeError, FileNotFoundError):
                    cover(unit_of(fuzzed, path), path)
            third = data.draw(st.sampled_from(["inspect", "copy"]))
            with little_memory():
                read_all(fuzzed, "verify", "restore", third)

    change_values()


@few_or_many
def test_readers_survive_any_bytes_in_a_record(fuzzed, written, examples):
    steps = sorted(int(path.name) for path in fuzzed.iterdir() if path.name.isdecimal())
    wanted = {step: contents(written[fuzzed.name], step) for step in steps}

    @settings(FUZZED, max_examples=examples)
    @given(data=st.data())
    def change_bytes(data):
        """Changes some bytes of a record: all values that are still read are correct."""
        with replaced(fuzzed):
            path = data.draw(st.sampled_from(step_records(fuzzed)))
            record = bytearray(path.read_bytes())
            for _ in range(data.draw(st.integers(1, 4))):
                place = data.draw(st.integers(0, len(record) - 1))
                record[place] = data.draw(st.integers(0, 255))
            if data.draw(st.booleans()):
                del record[data.draw(st.integers(0, len(record))) :]
            path.write_bytes(record)
            read_all(fuzzed, "verify", "check", "list")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for step in steps:
                    with contextlib.suppress(DeltackptError):
                        assert contents(fuzzed, step) == wanted[step]

    change_bytes()


@settings(deadline=None)
@given(data=st.binary(max_size=200) | st.lists(st.sampled_from(range(128, 256))).map(bytes))
def test_arbitrary_bytes_are_not_a_record(data):
    with pytest.raises(Damaged):
        manifest.from_bytes(data, name="it")


def test_lists_that_claim_to_be_longer_than_the_record_take_no_memory():
    """Each of the nested lists claims as many elements as the record has bytes."""
    nested = b"".join(b"\xdd" + (1 << 22).to_bytes(4, "big") for _ in range(500))
    data = nested + b"\x01" * (1 << 22)
    with little_memory(4 * len(data)), pytest.raises(Damaged):
        manifest.from_bytes(data, name="it")


OBSERVED = """
import sys, warnings
from pathlib import Path
import deltackpt, test_hostile_records as t
from golden import make_golden
warnings.simplefilter("ignore")
RUNS_CODE = {"exec", "compile", "import", "pickle.find_class", "marshal.loads", "os.system",
             "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "ctypes.dlopen"}
seen = None
sys.addaudithook(lambda event, args: seen is not None and event in RUNS_CODE and
                 seen.append((event, str(args)[:200])))
def read(directory):
    assert not t.read_all(directory)
    options = deltackpt.ManagerOptions(access="read")
    with deltackpt.CheckpointManager(
        directory, handlers=make_golden.handlers(), options=options
    ) as manager:
        assert manager.restore(30).step == 30
first, second = map(Path, sys.argv[1:])
read(first)  # What is imported and compiled lazily.
seen = []
read(second)
found, seen = seen, None
assert not found, found
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["shards-v1", "encodings-v1"])
def test_reading_a_directory_runs_no_code_from_it(kind, tmp_path):
    for name in ("first", "second"):
        shutil.copytree(GOLDEN / kind, tmp_path / name)
    run_program(OBSERVED, tmp_path / "first", tmp_path / "second")
