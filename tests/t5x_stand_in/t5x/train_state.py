# SPDX-License-Identifier: Apache-2.0
"""Train states of a very small T5, with T5X's names and shapes of leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import traverse_util

PARAMETERS = {
    "token_embedder/embedding": lambda rows: (rows, 8),
    "encoder/encoder_norm/scale": lambda rows: (8,),
    "encoder/relpos_bias/rel_embedding": lambda rows: (8, 32),
    "encoder/layers_0/attention/key/kernel": lambda rows: (8, 32),
    "decoder/decoder_norm/scale": lambda rows: (8,),
    "decoder/logits_dense/kernel": lambda rows: (8, rows),
}


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Leaves by their '/'-joined paths."""

    leaves: dict[str, Any]

    @property
    def step(self):
        """The step, a scalar."""
        return self.leaves["state/step"]

    def state_dict(self):
        """Returns the leaves as nested dicts."""
        return traverse_util.unflatten_dict(self.leaves, sep="/")

    def restore_state(self, state_dict):
        """Returns a state with other leaves."""
        return TrainState(traverse_util.flatten_dict(state_dict, keep_empty_nodes=True, sep="/"))

    def mapped(self, function):
        """Returns the state with ``function(name, leaf)`` in place of each leaf."""
        return TrainState({name: function(name, leaf) for name, leaf in self.leaves.items()})


def abstract(optimizer, rows):
    """Returns an abstract state with the slots of an optimizer; None for inference."""
    shapes = {name: shape(rows) for name, shape in PARAMETERS.items()}
    leaves = {f"target/{name}": shape for name, shape in shapes.items()}
    if optimizer == "adamw":
        for moment in ("mu", "nu"):
            leaves |= {f"state/param_states/0/{moment}/{n}": s for n, s in shapes.items()}
    elif optimizer is not None:
        for name, shape in shapes.items():
            factored = len(shape) == 2
            momentum = shape if "momentum" in optimizer else (1,)
            slots = {"m": momentum, "v": (1,) if factored else shape}
            slots["v_row"], slots["v_col"] = (shape[:1], shape[1:]) if factored else ((1,), (1,))
            leaves |= {f"state/param_states/{name}/{slot}": s for slot, s in slots.items()}
    found = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in leaves.items()}
    integers = ["state/step", *(["state/param_states/0/count"] if optimizer == "adamw" else [])]
    found |= {name: jax.ShapeDtypeStruct((), np.int32) for name in integers}
    return TrainState(found)
