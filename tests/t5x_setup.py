# SPDX-License-Identifier: Apache-2.0
"""T5X if it is installed, otherwise the stand-in of ``t5x_stand_in``; and small models of either.

``python tests/t5x_setup.py COMMIT`` records the signatures of the installed T5X of that commit.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("t5x_signatures.json")


def _is_installed() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.util.find_spec("t5x.checkpoints") is not None
        except ImportError:
            return False


#: Whether T5X itself is installed.
REAL = _is_installed()
if not REAL:
    # ``examples/t5x`` may have been imported under that name.
    sys.modules.pop("t5x", None)
    sys.path.insert(0, str(Path(__file__).with_name("t5x_stand_in")))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from t5x import checkpoints as checkpoints
    from t5x import partitioning
    from t5x import utils as utils

ROWS = 64
OPTIMIZERS = ("adafactor", "adafactor with momentum", "adamw")
#: Names that the drop-in and its tests use.
_USED = {
    "checkpoints": (
        *("all_steps", "get_local_data", "get_step_from_checkpoint_dir"),
        *("populate_metrics_for_steps", "_construct_orbax_param_infos"),
        *("DatasetArgs", "DatasetCheckpointHandler", "DatasetCheckpointHandler.save"),
        *("DatasetCheckpointHandler.restore", "OrbaxCheckpointManagerInterface"),
        *(
            f"OrbaxCheckpointManagerInterface.{name}"
            for name in (
                *("all_steps", "latest_step", "should_save", "wait_until_finished"),
                *("close", "save", "restore"),
            )
        ),
    ),
    "state_utils": ("flatten_state_dict",),
    "utils": ("RestoreCheckpointConfig", "get_first_valid_restore_config_and_paths"),
    "partitioning": (
        *("DataLayout", "BasePartitioner.get_data_layout", "BasePartitioner.get_mesh_axes"),
    ),
}


class _Default(str):
    """A default, represented by its text."""

    __repr__ = str.__str__


def signatures() -> dict[str, str]:
    """Returns the signatures of all used names, without annotations."""
    found: dict[str, str] = {}
    for module, names in _USED.items():
        for name in names:
            value: Any = importlib.import_module(f"t5x.{module}")
            for piece in name.split("."):
                value = getattr(value, piece)
            found[f"{module}.{name}"] = str(bare(inspect.signature(value)))
    return found


def bare(signature: inspect.Signature) -> inspect.Signature:
    """Returns a signature without annotations, with each default as its text."""
    parameters = []
    for parameter in signature.parameters.values():
        if (default := parameter.default) is not parameter.empty:
            default = _Default(default.__name__ if inspect.isclass(default) else repr(default))
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def make_partitioner() -> Any:
    """Returns a partitioner that splits tables in four."""
    if not REAL:
        return partitioning.BasePartitioner(num_partitions=4)
    return partitioning.PjitPartitioner(
        num_partitions=4, logical_axis_rules=partitioning.standard_logical_axis_rules()
    )


def make_initializer(optimizer: str = "adafactor", *, training: bool = True) -> Any:
    """Returns T5X's initializer of a very small T5.1.1; the stand-in has two of its names."""
    if not REAL:
        from t5x import train_state

        return types.SimpleNamespace(
            global_train_state_shape=train_state.abstract(optimizer if training else None, ROWS),
            _partitioner=make_partitioner(),
        )
    import seqio
    from t5x import adafactor, models, optimizers
    from t5x.examples.t5 import network

    rules = adafactor.standard_logical_factor_rules()
    optimizer_def = {
        "adafactor": lambda: adafactor.Adafactor(decay_rate=0.8, logical_factor_rules=rules),
        "adafactor with momentum": lambda: adafactor.Adafactor(
            decay_rate=0.8, beta1=0.9, logical_factor_rules=rules
        ),
        "adamw": lambda: optimizers.adamw(learning_rate=0.1),
    }[optimizer]()
    config = network.T5Config(
        vocab_size=ROWS,
        emb_dim=8,
        num_heads=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=4,
        mlp_dim=16,
    )
    model = models.EncoderDecoderModel(
        network.Transformer(config),
        seqio.ByteVocabulary(),
        seqio.ByteVocabulary(),
        optimizer_def,
    )
    shapes = {
        name: (2, 4)
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    }
    return utils.TrainStateInitializer(
        optimizer_def if training else None,
        model.get_initial_variables,
        shapes,
        make_partitioner(),
    )


class _Numbers:
    """0, 1, 2 and so on, with a position that can be saved."""

    def __init__(self) -> None:
        self._next = 0

    def __next__(self) -> dict[str, int]:
        self._next += 1
        return {"number": self._next - 1}

    def save(self, path: str) -> None:
        Path(path).write_text(json.dumps(self._next))

    def load(self, path: str) -> None:
        self._next = json.loads(Path(path).read_text())


def numbers() -> Any:
    """Returns an iterator of 0, 1, 2 and so on, whose position T5X can save."""
    if not REAL:
        return _Numbers()
    import clu.data.dataset_iterator
    import tensorflow as tf

    data = tf.data.Dataset.range(100).map(lambda number: {"number": number})
    iterator = clu.data.dataset_iterator.TfDatasetIterator(data, checkpoint=True)
    return clu.data.dataset_iterator.PeekableDatasetIterator(iterator)


def write_metric(model_dir: Path, step: int, value: float) -> None:
    """Writes the summary ``inference_eval/accuracy`` of a step."""
    folder = model_dir / "inference_eval"
    if not REAL:
        folder.mkdir(exist_ok=True)
        with (folder / "summaries.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "accuracy": value}) + "\n")
        return
    from clu import metric_writers

    writer = metric_writers.SummaryWriter(str(folder))
    writer.write_scalars(step, {"accuracy": value})
    writer.flush()
    writer.close()


if __name__ == "__main__":
    assert REAL, "expected T5X, found the stand-in"
    record = {"commit": sys.argv[1], "signatures": signatures()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
