# SPDX-License-Identifier: Apache-2.0
"""States without a template: nested dicts and lists, tables grafted in by their paths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from deltackpt.format.manifest import KeyPath, Layout, path_name


def nested(layout: Layout, by_name: Mapping[str, Any], dense: Mapping[str, Any]) -> Any:
    """Returns nested dicts and lists of all leaves, by their typed key paths."""
    stored = (path for table in layout.tables for path in table.leaves.values())
    found: list[tuple[KeyPath, Any]] = [
        (path, by_name[path_name(path)]) for path in stored if path_name(path) in by_name
    ]
    for leaf in layout.dense:
        with contextlib.suppress(KeyError):  # dense leaves may be restored in part
            found.append((leaf.path, dense_at(dense, leaf.key)))
    return nested_at(found)


def nested_at(found: Iterable[tuple[KeyPath, Any]]) -> Any:
    """Returns nested dicts and lists of some leaves, each at its typed key path."""
    root: dict[Any, Any] = {}
    for path, value in found:
        node = root
        for entry in path[:-1]:
            node = node.setdefault(entry, {})
        node[path[-1]] = value
    return _typed(root)


def _typed(node: Any) -> Any:
    """Turns a dict with key entries as keys into a list or a plain dict."""
    if not isinstance(node, dict) or not all(_is_entry(key) for key in node):
        return node
    items = {key[1]: _typed(child) for key, child in node.items()}
    if node and all(key[0] == "seq" for key in node):
        # A hole is a part of the state that had no leaf, or was not requested.
        return [items.get(i) for i in range(max(items) + 1)]
    return items


def _is_entry(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2


def dense_at(dense: Mapping[str, Any], key: tuple[str, ...]) -> Any:
    """Returns the dense leaf at a key of nested dicts."""
    node: Any = dense
    for step in key:
        if not isinstance(node, Mapping):
            raise KeyError(step)
        node = node[step]
    return node
