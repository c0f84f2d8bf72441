# SPDX-License-Identifier: Apache-2.0
"""Where the values of a database stand, so that they can be read past TensorStore.

TensorStore hands a value over as a copy of a copy. Its OCDBT format keeps what is longer than 1 KiB
as it is, somewhere in a file: a reader that knows where has the bytes in their final place after
one read, and can compare the file with a digest on the way.
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
      nbytes: how many there are.
    """

    file: str
    start: int
    nbytes: int


class Index(NamedTuple):
    """The last version of a database.

    Attributes:
      values: key to where the value stands, or to the value itself: short ones are kept in nodes.
      nodes: the files that say so.
    """

    values: Mapping[str, Extent | memoryview]
    nodes: frozenset[str]


def index(folder: Reachable) -> Index:
    """Reads the nodes of a database.

    Args:
      folder: of the database.

    Raises:
      ValueError, OSError: it is none, it is damaged, or it cannot be read.
    """
    base: Any = ts.KvStore.open(folder.spec, context=folder.context).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    values: dict[str, Extent | memoryview] = {}
    nodes = {_MANIFEST}
    level: list[tuple[bytes, str]] = [(b"", root["location"])] if "location" in root else []
    while level:
        nodes.update(_extent(location).file for _, location in level)
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
    return Index(values, frozenset(nodes))


def _extent(location: str) -> Extent:
    """A location as TensorStore words it: ``KIND:FOLDER:FILE:START:LENGTH``, names escaped."""
    _, folder, file, start, nbytes = location.split(":")
    path = urllib.parse.unquote(folder) + urllib.parse.unquote(file)
    return Extent(path, int(start), int(nbytes))
