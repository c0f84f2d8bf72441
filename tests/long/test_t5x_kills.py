# SPDX-License-Identifier: Apache-2.0
"""Kills a run of T5X's own launcher, which must resume bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from t5x_setup import REAL, checkpoints

from deltackpt import inspect

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not REAL, reason="T5X is on no package index; see docs/how-to/t5x.md"),
    pytest.mark.timeout(900),
]

TASK = """
import seqio
import tensorflow as tf

def words(split, shuffle_files=False, seed=None):
    text = [f"{number} times {number} is {number * number}" for number in range(400)]
    return tf.data.Dataset.from_tensor_slices({"inputs": text, "targets": text[::-1]})

seqio.TaskRegistry.add(
    "squares",
    source=seqio.FunctionDataSource(words, splits=["train"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    output_features={
        name: seqio.Feature(seqio.ByteVocabulary(extra_ids=0)) for name in ("inputs", "targets")
    },
)
"""

RUN = """
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
import squares
from t5x import utils
from t5x.examples.t5 import network

include "t5x/examples/t5/t5_1_1/small.gin"
include "t5x/configs/runs/pretrain.gin"
include "deltackpt.gin"

VOCABULARY = @seqio.ByteVocabulary()
seqio.ByteVocabulary.extra_ids = 0
MIXTURE_OR_TASK_NAME = "squares"
TASK_FEATURE_LENGTHS = {"inputs": 16, "targets": 16}
DROPOUT_RATE = 0.1
BATCH_SIZE = 8
USE_CACHED_TASKS = False
RANDOM_SEED = 1
network.T5Config:
  vocab_size = 384
  dtype = "float32"
  emb_dim = 16
  num_heads = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 32
train_script.train:
  train_eval_dataset_cfg = None
  stats_period = 1
train/utils.DatasetConfig:
  seed = 7
  pack = False
utils.SaveCheckpointConfig.period = 2
"""


def losses(model_dir):
    import tensorflow as tf

    found = {}
    for path in sorted((model_dir / "train").glob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.tag == "loss":
                    found[event.step] = tf.make_ndarray(value.tensor).tobytes()
    return found


@pytest.fixture
def launch(tmp_path, repository):
    (tmp_path / "squares.py").write_text(TASK)
    (tmp_path / "run.gin").write_text(RUN)

    def start(model_dir, steps):
        folders = [tmp_path, Path(checkpoints.__file__).parents[1], repository / "examples" / "t5x"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        environment.pop("XLA_FLAGS", None)
        command = [
            sys.executable,
            "-m",
            "t5x.train",
            f"--gin_search_paths={','.join(map(str, folders))}",
            "--gin_file=run.gin",
            f"--gin.MODEL_DIR='{model_dir}'",
            f"--gin.TRAIN_STEPS={steps}",
        ]
        log = open(tmp_path / "log", "ab")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)

    return start


def test_a_killed_t5x_run_resumes_with_the_losses_of_an_uninterrupted_one(tmp_path, launch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(whole, 10).wait(300) == 0, (tmp_path / "log").read_text()
    killed = launch(cut, 10)
    steps = cut / "deltackpt"
    while killed.poll() is None and not any(
        path.is_file()
        for writing in steps.glob("6.orbax-checkpoint-tmp*")
        for path in writing.rglob("*")
    ):
        time.sleep(0.001)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert launch(cut, 10).wait(300) == 0, (tmp_path / "log").read_text()
    assert len(losses(whole)) == 10 and losses(cut) == losses(whole)
    kinds = {save.step: save.kind for save in inspect.open(steps).saves}
    assert list(kinds) == [0, 2, 4, 6, 8, 10] and kinds[6] == "delta"
