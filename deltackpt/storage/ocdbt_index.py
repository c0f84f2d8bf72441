# SPDX-License-Identifier: Apache-2.0
"""Locates the values of an OCDBT database, so that they can be read without TensorStore.

TensorStore returns values with two copies. OCDBT stores values longer than 1 KiB uncompressed in a
file. A reader that knows the location reads the bytes directly into their destination, and can
compare the file with a digest.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorstore as ts

from deltackpt.storage.kv_store import Reachable

_MANIFEST = "manifest.ocdbt"


class Extent(NamedTuple):
    """A run of bytes in a file.

    Attributes:
      file: path below the database's folder.
      start: first byte in the file.
      nbytes: length in bytes.
    """

    file: str
    start: int
    nbytes: int


class Index(NamedTuple):
    """The last version of a database.

    Attributes:
      values: location of each value by key, or the value itself: short ones are stored in nodes.
      nodes: extents of the tree's nodes, by file; empty for the manifest, which is needed whole.
    """

    values: Mapping[str, Extent | memoryview]
    nodes: Mapping[str, tuple[Extent, ...]]


def index(folder: Reachable) -> Index:
    """Reads the nodes of a database.

    Args:
      folder: folder of the database.

    Raises:
      ValueError, OSError: it is not a database, is damaged, or is not readable.
    """
    base: Any = ts.KvStore.open(folder.spec, context=folder.context).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    values: dict[str, Extent | memoryview] = {}
    nodes: dict[str, tuple[Extent, ...]] = {_MANIFEST: ()}
    level: list[tuple[bytes, str]] = [(b"", root["location"])] if "location" in root else []
    while level:
        for at in (_extent(location) for _, location in level):
            nodes[at.file] = (*nodes.get(at.file, ()), at)
        asked = [(prefix, ts.ocdbt.dump(base, location)) for prefix, location in level]
        level = []
        for prefix, answer in asked:
            node = answer.result()
            for entry in node["entries"]:
                if node["height"]:
                    level.append((prefix + entry["subtree_common_prefix"], entry["location"]))
                    continue
                key = (prefix + entry["key"]).decode()
                short = entry.get("inline_value")
                if short is not None:
                    values[key] = memoryview(short)
                else:
                    values[key] = _extent(entry["indirect_value"])
    return Index(values, nodes)


def _extent(location: str) -> Extent:
    """A location as TensorStore words it: ``KIND:FOLDER:FILE:START:LENGTH``, names escaped."""
    _, folder, file, start, nbytes = location.split(":")
    path = urllib.parse.unquote(folder) + urllib.parse.unquote(file)
    return Extent(path, int(start), int(nbytes))
