# SPDX-License-Identifier: Apache-2.0
"""Damaged layers: a typed error names file, row group and chunk; no wrong value is ever read."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import google_crc32c
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from made_up_layers import (
    NAME,
    Memory,
    contents_of,
    fields_of,
    footed,
    groups_of,
    manifest_of,
    opened,
    place_of,
    read_all,
    refooted,
    with_fields,
    write,
)
from test_hostile_records import little_memory, places

from deltackpt.errors import Damaged, FormatTooNew
from deltackpt.layers import footer
from deltackpt.layers.footer import CHUNK, PAGE_BYTES, TRAILER_BYTES
from deltackpt.layers.read import LayerReader, StoredBytes
from deltackpt.storage.store import store_path

#: Bound on the memory for reading a file of some kilobytes.
MOST_MEMORY = 64 << 20
FAST = settings(max_examples=100, deadline=None)


@functools.cache
def layer_bytes() -> bytes:
    """A layer with several chunks in most arrays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, NAME)
        write(path, [(manifest_of(), groups_of(count=60))], chunk_bytes=256)
        return path.read_bytes()


def footer_start(data: bytes | bytearray) -> int:
    return footer.trailer_of(data[-TRAILER_BYTES:], len(data), NAME).footer


def test_every_flipped_byte_is_an_error_that_names_its_place():
    data = bytearray(layer_bytes())
    # The footer is read from the intact bytes.
    layer, expected, end = opened(data), read_all(opened(data)), footer_start(data)
    places = set()
    for at in range(len(data)):
        data[at] ^= 1 << at % 8
        place = place_of(layer, at)
        with pytest.raises(Damaged) as error:
            layer.verify() if at < end else opened(data)
        assert error.value.object_name == place
        if at in range(PAGE_BYTES, end, 7):
            with pytest.raises(Damaged) as error:
                read_all(layer)
            assert error.value.object_name == place
        places.add(place)
        data[at] ^= 1 << at % 8
    assert len(places) > 10
    layer.verify()
    assert read_all(layer) == expected


def test_every_truncation_is_an_error_that_names_the_file():
    data = layer_bytes()
    for length in range(len(data)):
        for nbytes in (length, len(data)):
            with pytest.raises(Damaged, match=rf"^{NAME}: footer"):
                LayerReader(Memory(data[:length]), nbytes)
    with pytest.raises(Damaged, match=rf"^{NAME}: footer"):
        opened(data + bytes(PAGE_BYTES))


def test_a_file_truncated_after_opening_is_an_error_that_names_the_chunk():
    data = bytearray(layer_bytes())
    layer, whole = opened(data), bytes(data)
    for length in range(PAGE_BYTES, footer_start(data), 50):
        del data[length:]
        for read in (layer.verify, functools.partial(read_all, layer)):
            with pytest.raises(Damaged, match="row group '.*', array '.*', chunk"):
                read()
        data[:] = whole


@FAST
@given(data=st.data())
def test_lost_or_moved_pages_are_an_error(data):
    held = bytearray(layer_bytes())
    count = len(held) // PAGE_BYTES
    page = data.draw(st.integers(0, count - 1)) * PAGE_BYTES
    other = data.draw(st.integers(0, count)) * PAGE_BYTES
    # The page after the last one represents a lost page.
    replaced = bytes(held[other : other + PAGE_BYTES]) or bytes(PAGE_BYTES)
    if replaced == held[page : page + PAGE_BYTES]:
        return
    held[page : page + PAGE_BYTES] = replaced
    with pytest.raises(Damaged, match=f"^{NAME}: "):
        opened(held).verify()


def test_a_chunk_of_another_layer_is_an_error(tmp_path):
    """Its checksum, place and length are right; only the save differs."""
    for number in (1, 2):
        write(tmp_path / f"{number}", [(manifest_of(number), groups_of(1))])
    one, other = ((tmp_path / name).read_bytes() for name in "12")
    with pytest.raises(Damaged, match="row group 'users.left', array 'values', chunk 0: .*crc32c"):
        read_all(opened(with_fields(other, arrays=fields_of(one)["arrays"])))


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(Damaged, match="layer.7: footer"):
        LayerReader(StoredBytes(store_path(tmp_path / "layer.7")), 8192)


@pytest.mark.parametrize(
    "changed",
    [
        {"features": ["tombstones", "later"]},
        {"features": ["later"], "row_groups": [{"kind": "later"}], "arrays": 3},
    ],
)
def test_an_unknown_feature_is_refused(changed):
    with pytest.raises(FormatTooNew, match=f"{NAME}: footer.*newer deltackpt"):
        opened(with_fields(layer_bytes(), **changed))


@pytest.mark.parametrize("version", [0, 2, 1 << 31])
def test_another_version_is_refused(version):
    data = bytearray(layer_bytes())
    start, at = footer_start(data), len(data) - TRAILER_BYTES + 8
    data[at : at + 4] = version.to_bytes(4, "little")
    with pytest.raises(Damaged, match="crc32c"):
        opened(data)  # A flipped bit is damage, not another version.
    data[-4:] = google_crc32c.value(bytes(data[start:-4])).to_bytes(4, "little")
    with pytest.raises(FormatTooNew if version else Damaged, match="version"):
        opened(data)
    page = bytes(data[:8]) + version.to_bytes(4, "little") + bytes(data[12 : PAGE_BYTES - 4])
    page += google_crc32c.value(page).to_bytes(4, "little")
    with pytest.raises(FormatTooNew if version else Damaged, match="version"):
        footer.header_of(page, NAME)


def test_unknown_fields_are_ignored():
    data = with_fields(layer_bytes(), later={"a": [1]})
    assert read_all(opened(data)) == contents_of(groups_of(count=60))


def chunks(*each: tuple[int, int, int]) -> bytes:
    return np.array([*each], CHUNK).tobytes()


ARRAY = {"row_group": "g", "name": "a", "shape": [4], "dtype": "uint8", "chunk_rows": 4}
GROUP = {"name": "g", "group": "t", "count": 4, "ranges": [[0, 4]]}
GAPS = {"row_group": "g", "name": "rows.gaps", "shape": [4], "dtype": "uint8", "chunk_rows": 4}
GAPS_CHUNK = GAPS | {"chunks": chunks((4096, 4, 0))}
INDEXED = GROUP | {"ranges": None}
HUGE = {"compression": "zstd", "shape": [1 << 40], "chunk_rows": 1 << 40}
#: Row groups, arrays, and the expected error message.
UNSOUND = {
    "two row groups of one name": ([GROUP, GROUP], [], "different names"),
    "an array of no row group": ([], [ARRAY | {"shape": [0]}], "a known row group"),
    "two arrays of one name": ([GROUP], [ARRAY | {"shape": [0]}] * 2, "another name"),
    "ranges of other rows": ([GROUP | {"ranges": [[0, 5]]}], [], "ranges of 4 rows"),
    "overlapping ranges": ([GROUP | {"ranges": [[0, 2], [1, 3]]}], [], "ascending rows"),
    "an empty range": ([GROUP | {"ranges": [[0, 4], [7, 7]]}], [], "ascending rows"),
    "rows beyond all": ([GROUP | {"ranges": [[(1 << 63) - 2, (1 << 63) + 2]]}], [], "ascending"),
    "neither ranges nor gaps": ([INDEXED], [], "ranges, or an array 'rows.gaps' of 4"),
    "ranges and gaps": ([GROUP], [GAPS_CHUNK], "no array 'rows.gaps'"),
    "gaps of other rows": ([INDEXED | {"count": 3}], [GAPS_CHUNK], "'rows.gaps' of 3 gaps"),
    "gaps that are signed": ([INDEXED], [GAPS_CHUNK | {"dtype": "int8"}], "'rows.gaps' of 4 gaps"),
    "compressed gaps": ([INDEXED], [GAPS_CHUNK | {"compression": "zstd"}], "uncompressed gaps"),
    "gaps without bounds": ([INDEXED], [GAPS_CHUNK], "1 bounds"),
    "bounds of fewer rows": ([INDEXED | {"bounds": [[0, 2]]}], [GAPS_CHUNK], "at least 4 rows"),
    "descending bounds": (
        [INDEXED | {"bounds": [[4, 7], [0, 3]]}],
        [GAPS | {"chunk_rows": 2, "chunks": chunks((4096, 2, 0), (4098, 2, 0))}],
        "ascending rows",
    ),
    "descending columns": ([GROUP | {"columns": [3, 2]}], [], "ascending columns"),
    "a huge count": ([GROUP | {"count": 1 << 63}], [], "at most"),
    "an unknown kind": ([GROUP | {"kind": "later"}], [], "one of"),
    "an unknown dtype": ([GROUP], [ARRAY | {"dtype": "object"}], "one of"),
    "no axis": ([GROUP], [ARRAY | {"shape": []}], "axes"),
    "a huge shape": ([GROUP], [ARRAY | {"shape": [1 << 62, 1 << 62]}], "at most .* bytes"),
    "chunks of no rows": ([GROUP], [ARRAY | {"chunk_rows": 0}], "1 or more"),
    "too few chunks": ([GROUP], [ARRAY], "20 bytes of chunks"),
    "a negative length": ([GROUP], [ARRAY | {"shape": [-4]}], "non-negative"),
    "a short chunk": ([GROUP], [ARRAY | {"chunks": chunks((4096, 3, 0))}], "chunks of 4 bytes"),
    "a compressed chunk that is longer": (
        [GROUP],
        [ARRAY | {"compression": "zstd", "chunks": chunks((4096, 5, 0))}],
        "chunks of 4 bytes",
    ),
    "a compressed chunk of too many bytes": (
        [GROUP],
        [ARRAY | HUGE | {"chunks": chunks((4096, 20, 0))}],
        "chunks of 1099511627776 bytes",
    ),
    "a chunk beyond the footer": (
        [GROUP],
        [ARRAY | {"chunks": chunks((1 << 63, 4, 0))}],
        "chunks that cover",
    ),
    "overlapping chunks": (
        [GROUP],
        [ARRAY | {"shape": [8], "chunks": chunks((4096, 4, 0), (4098, 4, 0))}],
        "cover the layer exactly",
    ),
    "bytes after the last chunk": ([GROUP], [], "cover the layer exactly"),
    "long padding": (
        [GROUP],
        [ARRAY | {"shape": [8], "chunks": chunks((4096, 4, 0), (9000, 4, 0))}],
        "cover the layer exactly",
    ),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_an_inconsistent_manifest_is_damaged_even_if_its_checksum_is_right(name):
    row_groups, arrays, expected = UNSOUND[name]
    ends = [
        int(offset + nbytes)
        for array in arrays
        for offset, nbytes, _ in np.frombuffer(array.get("chunks", b""), CHUNK)
    ]
    at = max((end for end in ends if end < 1 << 20), default=PAGE_BYTES)
    at += name == "bytes after the last chunk"
    fields = fields_of(layer_bytes()) | {"row_groups": row_groups, "arrays": arrays}
    with pytest.raises(Damaged, match=f"^{NAME}: footer: expected .*{expected}.* found"):
        opened(footed(bytes(at), msgpack.packb(fields)))


@pytest.mark.parametrize(
    "changed",
    [
        {"sequence": 1 << 63},
        {"predecessor": 1 << 32},
        {"process": 1},
        {"save_id": {"run": "a/b", "step": 1, "attempt": 1}},
        {"save_id": {"run": "a", "step": 1 << 63, "attempt": 1}},
        {"parent": {"run": "", "step": 1, "attempt": 1}},
        {"epoch": {"number": 1}},
        {"features": "tombstones"},
    ],
)
def test_an_invalid_identity_is_damaged(changed):
    (name,) = changed
    with pytest.raises(Damaged, match=f"^{NAME}: footer: .*{name}"):
        opened(with_fields(layer_bytes(), **changed))


def with_chunk(data: bytes, group: dict[str, Any], array: dict[str, Any]) -> LayerReader:
    """A layer with one chunk, whose checksum is right."""
    empty, held = np.empty(0, np.uint8), np.frombuffer(data, np.uint8)
    crc = footer.chunk_crc32c(manifest_of().seed, PAGE_BYTES, empty, held)
    array = array | {"chunks": chunks((PAGE_BYTES, len(data), crc))}
    fields = fields_of(layer_bytes()) | {"row_groups": [group], "arrays": [array]}
    return opened(footed(bytes(PAGE_BYTES) + data, msgpack.packb(fields)))


def rows_of(gaps: list[int], last: int, dtype: str = "uint8") -> list[int]:
    """Row indices from 5 to ``last``, decoded from gaps."""
    layer = with_chunk(
        np.array(gaps, dtype).tobytes(), INDEXED | {"bounds": [[5, last]]}, GAPS | {"dtype": dtype}
    )
    return np.asarray(layer.rows(layer.manifest.row_groups[0]).rows).tolist()


def test_row_indices_are_decoded_from_gaps():
    assert rows_of([0, 1, 2, 3], 11) == [5, 6, 8, 11]


@pytest.mark.parametrize(
    ("gaps", "last", "dtype"),
    [
        ([1, 1, 2, 3], 11, "uint8"),
        ([0, 0, 3, 3], 11, "uint8"),
        ([0, 1, 2, 4], 11, "uint8"),
        ([0, 2, 1, 2], 11, "uint8"),
        # Their sum wraps to the last row.
        ([0, 1 << 63, (1 << 63) + 3, 1 << 62], 8 + (1 << 62), "uint64"),
    ],
)
def test_row_indices_that_do_not_fit_their_bounds_are_damaged(gaps, last, dtype):
    with pytest.raises(Damaged, match="row group 'g', array 'rows.gaps', chunk 0: .*ascending"):
        rows_of(gaps, last, dtype)


@pytest.mark.parametrize(
    "data", [b"no zstd at all", zstandard.compress(bytes(99)), zstandard.compress(b"")]
)
def test_a_chunk_that_decompresses_to_another_length_is_damaged(data):
    array = ARRAY | {"compression": "zstd", "shape": [100], "chunk_rows": 100}
    layer = with_chunk(data, GROUP, array)
    [stored] = layer.arrays(layer.manifest.row_groups[0]).values()
    with pytest.raises(Damaged, match="row group 'g', array 'a', chunk 0"):
        layer.read_into(stored, 0, 100, np.empty(100, np.uint8))


def attempt(data: bytes) -> None:
    """Reads everything in pieces of bounded memory; typed errors are expected."""
    with little_memory(MOST_MEMORY), contextlib.suppress(Damaged, FormatTooNew):
        layer = opened(data)
        for group in layer.manifest.row_groups:
            layer.rows(group, 0, 1 << 62)
            for array in layer.arrays(group).values():
                count = min(array.shape[0], (1 << 20) // max(1, array.row_bytes))
                out = np.empty((count, *array.shape[1:]), array.dtype)
                layer.read_into(array, 0, count, out)
        layer.verify()


ODD = st.one_of(
    st.sampled_from([0, 1, -1, 255, 4096, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1, None, True]),
    st.sampled_from(["", "users", "rows.gaps", "zstd", "planes", "uint64", "float32", "item"]),
    st.sampled_from([[], {}, [[]], [[0, 1]], [[1, 0]], [1 << 40, 0], [0, 1 << 62], b""]),
    st.integers(-5, 1 << 64 - 1),
    st.binary(max_size=60),
)


@FAST
@given(data=st.data())
def test_a_footer_with_odd_values_needs_bounded_memory_and_raises_typed_errors(data):
    fields = fields_of(layer_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from(sorted(places(fields), key=str)))
        inside = fields
        for key in above:
            inside = inside[key]
        if data.draw(st.booleans()) and isinstance(inside[last], bytes) and inside[last]:
            held = bytearray(inside[last])
            at = data.draw(st.integers(0, len(held) - 1))
            held[at] = data.draw(st.integers(0, 255))
            inside[last] = bytes(held)
        else:
            inside[last] = copy.deepcopy(data.draw(ODD))
    attempt(refooted(layer_bytes(), msgpack.packb(fields)))


@FAST
@given(data=st.data())
def test_a_footer_of_altered_bytes_needs_bounded_memory_and_raises_typed_errors(data):
    held = bytearray(msgpack.packb(fields_of(layer_bytes())))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(held) - 1))
        held[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=6))
    attempt(refooted(layer_bytes(), bytes(held)))


@FAST
@given(data=st.data())
def test_a_trailer_with_odd_values_needs_bounded_memory_and_raises_typed_errors(data):
    held = bytearray(layer_bytes())
    at = len(held) - TRAILER_BYTES + data.draw(st.sampled_from([8, 12, 20, 28]))
    value = data.draw(st.sampled_from([0, 1, 64, 4096, 8192, len(held), 1 << 40, (1 << 64) - 1]))
    held[at : at + 8] = value.to_bytes(8, "little")
    attempt(bytes(held))
