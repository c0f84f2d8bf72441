# SPDX-License-Identifier: Apache-2.0
"""State dicts by '/'-joined paths."""

from __future__ import annotations

import re

from flax import traverse_util


def flatten_state_dict(state_dict, keep_empty_nodes=False):
    """Returns the leaves by their paths."""
    return traverse_util.flatten_dict(state_dict, keep_empty_nodes=keep_empty_nodes, sep="/")


def apply_assignment_map(stored, target, assignment_map, *, is_resuming=False):
    """Renames and drops leaves of a checkpoint by (pattern of the model's leaf, stored name)."""
    if is_resuming:
        return stored
    old = flatten_state_dict(stored)
    kept, found, dropped = dict(old), {}, set()
    for name in flatten_state_dict(target):
        for pattern, replacement in assignment_map:
            if match := re.fullmatch(pattern, name):
                if replacement is None:
                    dropped.add(name)
                else:
                    source = match.expand(replacement)
                    found[name] = old[source]
                    kept.pop(source, None)
                break
    left = {name: leaf for name, leaf in kept.items() if name not in dropped}
    return traverse_util.unflatten_dict({**left, **found}, sep="/")
