# SPDX-License-Identifier: Apache-2.0
"""T5X's names, without T5X: tables and slots of its state dicts, links to our steps."""

from __future__ import annotations

import errno
import importlib
import os
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt.errors import MissingExtra, OutOfSpace, StorageError
from deltackpt.integrations.t5x.layout import StepLinks, model_dir_of, tables_of
from deltackpt.state.tables import split

TABLE = "target/token_embedder/embedding"
KEPT = "state/param_states/token_embedder/embedding"


def target(rows=6, columns=4):
    return {
        "token_embedder": {"embedding": np.zeros((rows, columns), np.float32)},
        "encoder": {"relpos_bias": {"rel_embedding": np.zeros((2, 32), np.float32)}},
        "decoder": {"logits_dense": {"kernel": np.zeros((columns, rows), np.float32)}},
    }


def adafactor_state(rows=6, columns=4, **kept):
    """State of T5X's own optimizers: a dict of statistics in place of each parameter."""
    none = np.zeros(1, np.float32)
    table = {"v_row": np.zeros(columns), "v_col": np.zeros(rows), "v": none, "m": none} | kept
    others = {"v_row": none, "v_col": none, "v": none, "m": none}
    return {
        "step": np.int32(0),
        "param_states": {
            "token_embedder": {"embedding": table},
            "encoder": {"relpos_bias": {"rel_embedding": others}},
            "decoder": {"logits_dense": {"kernel": others}},
        },
    }


def slots_of(state):
    tables = tables_of(state, ["target/**/embedding"])
    # A real split of the state checks that it can be saved.
    pieces = split(state, tables)
    assert [table.name for table in pieces.layout.tables] == [TABLE]
    assert tables.slots is not None
    return dict(tables.slots[TABLE]), set(tables.always)


def test_relative_position_biases_are_not_tables():
    assert tables_of({"target": target(), "state": {}}, ["target/**/embedding"]).slots == {
        TABLE: {}
    }


def test_the_factored_statistic_of_the_rows_is_a_slot_that_is_always_written():
    found, always = slots_of({"target": target(), "state": adafactor_state()})
    assert found == {"v_col": f"{KEPT}/v_col"} and always == {"v_col"}


def test_momentum_is_a_slot_of_the_touched_rows_and_unfactored_statistics_are_written_whole():
    kept = adafactor_state(v_row=np.zeros(1), v_col=np.zeros(1), v=np.zeros((6, 4)))
    kept["param_states"]["token_embedder"]["embedding"]["m"] = np.zeros((6, 4))
    found, always = slots_of({"target": target(), "state": kept})
    assert found == {"v": f"{KEPT}/v", "m": f"{KEPT}/m"} and always == {"v"}


def test_a_square_table_has_both_factored_statistics_as_slots():
    found, always = slots_of({"target": target(4, 4), "state": adafactor_state(4, 4)})
    assert found.keys() == {"v_row", "v_col"} == always


def test_optax_moments_are_slots_if_they_have_the_names_of_the_parameters():
    moments = {"0": {"count": np.int32(0), "mu": target(), "nu": target()}}
    found, always = slots_of({"target": target(), "state": {"param_states": moments}})
    assert found == {
        "param_states/0/mu": "state/param_states/0/mu/token_embedder/embedding",
        "param_states/0/nu": "state/param_states/0/nu/token_embedder/embedding",
    }
    assert not always


def test_a_tree_that_lacks_a_parameter_gives_no_slots():
    piece = {"token_embedder": target()["token_embedder"]}
    state = {"target": target(), "state": {"param_states": {"mu": piece}}}
    assert slots_of(state) == ({}, set())


def test_a_checkpoint_path_resolves_to_its_model_directory(tmp_path):
    assert model_dir_of(tmp_path / "checkpoint_1200") == tmp_path
    assert model_dir_of(tmp_path) == tmp_path


def test_without_t5x_the_drop_in_reports_where_to_get_it(monkeypatch):
    for name in ("t5x", "t5x.checkpoints"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("delta_manager", "model", "settings"):
        monkeypatch.delitem(sys.modules, f"deltackpt.integrations.t5x.{name}", raising=False)
    with pytest.raises(MissingExtra, match="github.com/google-research/t5x"):
        importlib.import_module("deltackpt.integrations.t5x").checkpoint_manager()


steps = st.sets(st.integers(0, 9))


@given(linked=steps, foreign=steps, committed=steps)
def test_links_match_the_committed_steps_and_nothing_else_is_touched(
    tmp_path_factory, linked, foreign, committed
):
    model_dir = tmp_path_factory.mktemp("model")
    links = StepLinks(model_dir)
    for step in foreign:
        (model_dir / f"checkpoint_{step}").mkdir()
    for step in linked:
        links.add(step)
    links.match(committed)
    assert links.steps() == sorted(committed - foreign)
    assert links.others() == sorted(foreign)
    assert links.newest_of(range(5)) == max(
        (step for step in links.steps() if step < 5), default=None
    )
    for step in links.steps():
        assert os.readlink(model_dir / f"checkpoint_{step}") == f"deltackpt/{step}"


def test_a_link_to_somewhere_else_is_left_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint_5").symlink_to("elsewhere")
    links = StepLinks(tmp_path)
    links.match([])
    assert links.others() == [5] and (tmp_path / "checkpoint_5").is_symlink()


def test_a_moved_model_directory_keeps_its_links(tmp_path):
    links = StepLinks(tmp_path / "old")
    (links.root / "3").mkdir(parents=True)
    links.add(3)
    (tmp_path / "old").rename(tmp_path / "new")
    assert (tmp_path / "new" / "checkpoint_3").is_dir()


@pytest.mark.parametrize("number, kind", [(errno.EACCES, StorageError), (errno.ENOSPC, OutOfSpace)])
@pytest.mark.parametrize("call", ["symlink", "fsync", "unlink", "listdir"])
def test_a_file_system_error_names_the_object(tmp_path, monkeypatch, call, number, kind):
    links = StepLinks(tmp_path)
    links.add(1)

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(kind, match=str(tmp_path)):
        links.match([2])
