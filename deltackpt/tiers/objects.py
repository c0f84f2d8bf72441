# SPDX-License-Identifier: Apache-2.0
"""An object store as a place of copies, through TensorStore's key-value drivers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from deltackpt.errors import (
    Damaged,
)
from deltackpt.format import manifest, names
from deltackpt.format.chain import SaveInfo
from deltackpt.storage import digests
from deltackpt.storage.digests import Digest, Digests
from deltackpt.storage.kv_store import KvStore
from deltackpt.storage.store import Exists, Missing, Store
from deltackpt.tiers.places import (
    OTHER_COPY,
    Unit,
    check_bytes,
    differs,
    gone,
    head_name,
)


class ObjectStore:
    """Units in a Store of TensorStore: S3, Google Cloud Storage and others."""

    def __init__(self, spec: str | Mapping[str, Any], name: str, item: str):
        self.name = name.rstrip("/")
        self.item = item
        self._store: Store = KvStore(spec, self.name)

    def __enter__(self) -> ObjectStore:
        """Nothing needs to be held: whoever else copies a save writes the same objects.

        Whoever copies another one under its name is refused by its claim.
        """
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was held."""

    def steps(self) -> list[int]:
        """See ``Place``."""
        stems = [key.removesuffix(".msgpack") for key in self._keys(names.COPIED)]
        return [int(name) for name in stems if names.step_number(name) is not None]

    def in_use(self) -> str | None:
        """See ``Place``; no trainer commits to an object store."""
        return None

    def info(self, unit: Unit) -> SaveInfo | None:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            return None
        name = head_name(unit, self.item)
        shown = f"{self.name}/{unit.name}/{name}"
        if name not in marker:
            raise Damaged(shown, "a manifest", "none that the marker knows", OTHER_COPY)
        data = self.read(unit, name)
        check_bytes(shown, data, marker[name])
        head = manifest.from_bytes(data, name=shown)
        return SaveInfo.of(head, unit.step_dir)

    def digests(self, unit: Unit) -> dict[str, Digest]:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            raise gone(self, unit)
        return marker

    def read(self, unit: Unit, name: str) -> bytes:
        """See ``Place``."""
        data = self._get(f"{unit.name}/{name}")
        if data is None:
            raise Damaged(f"{self.name}/{unit.name}/{name}", "an object", "none", OTHER_COPY)
        return data

    def holds(self, unit: Unit, expected: Mapping[str, Digest], *, recheck: bool) -> bool:
        """See ``Place``."""
        marker = self._marker(unit)
        if marker is None:
            return False
        head = head_name(unit, self.item)
        if head not in marker or marker[head][:3] != expected[head][:3]:
            raise differs(f"{self.name}/{unit.name}", "the marker of another save")
        present = self._keys(unit.name)
        whole = all(name in present for name in expected) and {
            name: digest[:3] for name, digest in expected.items()
        } == {name: digest[:3] for name, digest in marker.items()}
        if whole and recheck:
            whole = all(self._is(unit, name, digest) for name, digest in expected.items())
        return whole

    def begin(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``; the name is claimed before any object is written."""
        # Of two that come at the same moment one is refused, and reads the other's.
        with contextlib.suppress(Exists):
            claim = self._claim(unit, expected)
            self._store.put(f"{names.COPIED}/{unit.name}.claim", claim, absent=True)
        self._require_claim(unit, expected)
        self._store.delete([self._marker_key(unit)])

    def discard(self, unit: Unit) -> None:
        """See ``Place``: objects without a marker are none."""

    def written(self, unit: Unit, name: str, expected: Digest) -> bool:
        """See ``Place``."""
        return self._is(unit, name, expected)

    def write(self, unit: Unit, name: str, data: bytes) -> None:
        """See ``Place``."""
        self._store.put(f"{unit.name}/{name}", data)

    def publish(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        """See ``Place``."""
        self._require_claim(unit, expected)
        marker = digests.digests_bytes(Digests.of(expected))
        self._store.put(self._marker_key(unit), marker)

    def _claim(self, unit: Unit, expected: Mapping[str, Digest]) -> bytes:
        """What says which save a name belongs to: the digest of its first manifest."""
        head = head_name(unit, self.item)
        return digests.digests_bytes(Digests.of({head: expected[head]}))

    def _require_claim(self, unit: Unit, expected: Mapping[str, Digest]) -> None:
        key = f"{names.COPIED}/{unit.name}.claim"
        if self._get(key) != self._claim(unit, expected):
            raise differs(f"{self.name}/{unit.name}", f"that {key} claims it for another save")

    def _is(self, unit: Unit, name: str, expected: Digest) -> bool:
        data = self._get(f"{unit.name}/{name}")
        return data is not None and digests.digest_bytes(data)[:3] == expected[:3]

    def _marker_key(self, unit: Unit) -> str:
        return names.copied_name(unit.name)

    def _marker(self, unit: Unit) -> dict[str, Digest] | None:
        key = self._marker_key(unit)
        data = self._get(key)
        if data is None:
            return None
        found = digests.digests_from(data, name=f"{self.name}/{key}")
        return {name: found.digest(name) for name in found.files}

    def _get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except Missing:
            return None

    def _keys(self, folder: str) -> set[str]:
        """Keys below a folder, as seen from it."""
        return {key.removeprefix(f"{folder}/") for key in self._store.keys(folder)}


def folder_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec whose path is a folder."""
    path = str(spec.get("path", "")).rstrip("/")
    return {**spec, "path": f"{path}/" if path else ""}
