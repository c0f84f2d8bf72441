# SPDX-License-Identifier: Apache-2.0
"""Plots show the contents of a directory, at any size."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import MadeUp as MadeUpSaves
from matplotlib.figure import Figure
from test_compact import write_chain

from deltackpt import inspect, units
from deltackpt.errors import MissingExtra, OptionError
from deltackpt.inspect import plots

OF_SAVES = (plots.timeline, plots.chain_lengths, plots.touched_fraction, plots.codec_error)
OF_TABLES = (plots.activity, plots.drift)


class MadeUp(MadeUpSaves):
    """Synthetic saves with their compacted bases."""

    @property
    def compacted(self):
        return {save.step: 70_000 for save in self.saves if save.compacted}

    def at(self, step=None):
        found = super().at(step)
        names = map(str, found.chain)
        found.reads = tuple(
            f"compacted/{name}" if int(name) in self.compacted else name for name in names
        )
        return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Five saves: a base and deltas, the third of which touches no row."""
    path = tmp_path_factory.mktemp("run")
    write_chain(path)
    return inspect.open(path)


def png(figure: Figure) -> bytes:
    return figure._repr_png_()  # pyright: ignore[reportAttributeAccessIssue]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def said(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def drawn(figure: Figure, label: str) -> tuple[np.ndarray, np.ndarray]:
    """The points under a label of the legend."""
    legend = figure.axes[0].get_legend()
    color = legend.legend_handles[labels(figure).index(label)].get_color()
    (line,) = (one for one in figure.axes[0].lines if one.get_color() == color)
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


@pytest.mark.parametrize(
    "made",
    [
        {"saves": 0, "tables": 0},
        {"saves": 1, "tables": 1},
        {"saves": 3, "tables": 1, "base_every": 1},
        {"saves": 30, "tables": 12, "codec": "adaptive4"},
        {"saves": 300, "tables": 3, "one_shot": True},
    ],
    ids=str,
)
def test_every_plot_draws_a_directory_of_any_size_without_a_warning(made):
    ck = MadeUp(**made)
    for plot in OF_SAVES:
        assert png(plot(ck)).startswith(b"\x89PNG")
    for plot in OF_TABLES if made["saves"] else ():
        assert png(plot(ck, "tables/C1")).startswith(b"\x89PNG")


def test_2000_saves_of_800_tables_are_drawn_and_omissions_are_stated():
    ck = MadeUp(2000, 800, base_every=300, codec="adaptive4")
    figure = plots.touched_fraction(ck)
    assert "the 8 with the most rows written, of 800" in said(figure)
    assert said(figure).endswith(", 400 of 1,993 deltas") and len(labels(figure)) == 8 + 1
    assert all(len(line.get_xdata()) <= 400 for line in figure.axes[0].lines)
    said_of_errors = said(plots.codec_error(ck))
    assert said_of_errors.endswith("the 8 with the largest errors, of 800, 400 of 2,000 saves")
    few = MadeUp(2000, 2, base_every=300)
    assert said(plots.activity(few, "tables/C1")).endswith("400 of 1,993 deltas")
    assert said(plots.drift(few, "tables/C1")).endswith("at 400 of 2,000 steps")


def test_timeline_shows_every_save_its_bytes_and_its_parent(directory):
    figure = plots.timeline(directory)
    saves = directory.saves
    sizes = {save.step: save.disk_bytes for save in saves}
    assert drawn(figure, "base") == ([0], [sizes[0]])
    steps, heights = drawn(figure, "delta")
    assert steps.tolist() == [1, 2, 3, 4]
    assert heights.tolist() == [sizes[step] for step in (1, 2, 3, 4)]
    links = figure.axes[0].collections[0].get_segments()
    assert [link[:, 0].tolist() for link in links] == [[1, 0], [2, 1], [3, 2], [4, 3]]
    assert said(figure).startswith("5 saves: 1 base, 4 deltas; ")


def test_timeline_marks_compacted_bases_and_steps_that_cannot_be_restored():
    ck = MadeUp(9, 2).with_save(5, compacted=True, chain_length=0)
    ck = ck.with_save(7, problem="its chain is broken")
    ck = ck.with_save(8, kind=None, parent=None, tables=(), problem="no manifest")
    figure = plots.timeline(ck)
    saved = sum(save.disk_bytes for save in ck.saves)
    assert said(figure) == (
        "9 saves: 1 base, 7 deltas, 1 unreadable; 1 broken chain; 1 compacted base; "
        f"{units.size(saved + 70_000)} on disk"
    )
    assert said(plots.timeline(ck.saves)).endswith(f"; {units.size(saved)} on disk")
    assert said(plots.timeline(ck.saves, compacted=ck.compacted)) == said(figure)
    assert drawn(figure, "with a compacted base")[0].tolist() == [ck.steps[5]]
    assert drawn(figure, "cannot be restored")[0].tolist() == ck.steps[7:]
    assert ck.steps[8] not in drawn(figure, "delta")[0]


def test_chain_lengths_are_the_deltas_that_a_restore_merges(directory):
    steps, lengths = drawn(plots.chain_lengths(directory), "deltas")
    assert lengths.tolist() == [len(directory.at(int(step)).chain) - 1 for step in steps]


def test_a_base_is_in_a_legend_only_if_one_is_drawn():
    ck = MadeUp(6, 1).with_save(3, compacted=True, chain_length=0)
    assert labels(plots.chain_lengths(ck)) == ["deltas", "base", "compacted base"]
    assert labels(plots.chain_lengths(ck.saves[1:3])) == ["deltas"]
    assert labels(plots.touched_fraction(ck)) == ["tables/C1", "base: all rows"]
    assert labels(plots.touched_fraction(ck.saves[1:])) == ["tables/C1"]


def test_touched_fraction_is_rows_of_the_delta_over_rows_of_the_table(directory):
    figure = plots.touched_fraction(directory)
    for name, table in directory.at().tables.items():
        steps, shares = drawn(figure, name)
        expected = [len(directory.touched(int(step))[name]) / table.shape[0] for step in steps]
        assert shares.tolist() == pytest.approx(expected)
    assert drawn(figure, "base: all rows")[0].tolist() == [0]
    one = plots.touched_fraction(directory, ["tables/users"])
    assert labels(one) == ["tables/users", "base: all rows"]


def test_touched_fraction_is_known_if_the_base_was_compacted_and_collected():
    ck = MadeUp(10, 1, seed=1)
    ck.saves = ck.saves[1:]
    steps, shares = drawn(plots.touched_fraction(ck), "tables/C1")
    assert steps.tolist() == ck.steps
    assert shares.tolist() == [save.rows / save.total_rows for save in ck.saves]


def test_activity_is_the_share_of_each_range_that_a_delta_holds(directory):
    mesh = plots.activity(directory, "tables/users", bins=7).axes[0].collections[0]
    edges = np.unique(np.linspace(0, 700, 8).astype(int))
    for column, step in enumerate((1, 2, 3, 4)):
        held = np.histogram(directory.touched(step)["tables/users"], edges)[0]
        assert np.asarray(mesh.get_array())[:, column] == pytest.approx(held / 100)


@settings(max_examples=25)
@given(bins=st.integers(1, 300), seed=st.integers(0, 50))
def test_activity_counts_every_row_once_for_any_bins(bins, seed):
    ck = MadeUp(4, 1, seed=seed)
    mesh = plots.activity(ck, "tables/C1", bins=bins).axes[0].collections[0]
    edges = np.asarray(mesh.get_coordinates())[:, 0, 1]
    assert len(edges) == 1 + min(bins, ck.shapes["tables/C1"][0])
    rows = np.diff(edges) @ np.asarray(mesh.get_array())
    assert rows == pytest.approx([save.rows for save in ck.saves if save.kind == "delta"])


def test_drift_is_the_distance_from_the_rows_of_the_base_step(directory):
    rows = [3, 50, 51, 299]
    figure = plots.drift(directory, "tables/items", rows, base=1)
    steps, greatest = drawn(figure, "largest")
    assert steps.tolist() == [1, 2, 3, 4]
    origin = directory.at(1)["tables/items"][rows]
    for step, found in zip(steps, greatest):
        moved = directory.at(int(step))["tables/items"][rows] - origin
        assert found == pytest.approx(np.linalg.norm(moved, axis=1).max(), rel=1e-6)
    assert "4 of 300 rows" in said(figure)
    assert labels(figure)[-1] == "median to 90 % quantile"


def test_drift_samples_the_same_rows_for_the_same_seed():
    ck = MadeUp(5, 1)
    asked = []
    history = ck.history
    ck.history = lambda table, rows, **kwargs: asked.append(rows) or history(table, rows, **kwargs)
    for seed in (0, 0, 1):
        plots.drift(ck, "tables/C1", seed=seed)
    assert asked[0].tolist() == asked[1].tolist() != asked[2].tolist()
    assert 0 < len(asked[0]) <= 1024 and asked[0].max() < ck.shapes["tables/C1"][0]


def test_drift_omits_non_finite_rows_and_states_how_many():
    ck = MadeUp(5, 1)
    history = ck.history

    def damaged(table, rows, **kwargs):
        found = history(table, rows, **kwargs)
        found.values[2, :2] = [[np.inf], [np.nan]]
        return found

    ck.history = damaged
    figure = plots.drift(ck, "tables/C1", [1, 2, 3])
    assert said(figure).endswith("; without 2 that are not finite")
    assert np.isfinite(drawn(figure, "largest")[1]).all()
    ck.history = lambda *args, **kwargs: damaged(*args, **kwargs)
    assert "no row is finite" in plots.drift(ck, "tables/C1", [1, 2]).axes[0].texts[0].get_text()


def test_codec_error_is_that_of_the_manifests_and_lossless_saves_are_labeled(directory):
    ck = MadeUp(6, 2, codec="int4")
    steps, errors = drawn(plots.codec_error(ck), "tables/C1 (int4)")
    assert steps.tolist() == ck.steps[1:]
    expected = [save.tables[0].relative_error for save in ck.saves[1:]]
    assert errors.tolist() == expected
    (text,) = plots.codec_error(directory).axes[0].texts
    assert text.get_text() == "every save is lossless"


def test_names_are_shown_as_they_are():
    ck = MadeUp(4, 2, prefix="_cost$_{x}$\\frac<b>")
    figure = plots.touched_fraction(ck)
    assert "_cost$_{x}$\\frac<b>C1" in labels(figure)
    for plot in OF_TABLES:
        png(plot(ck, "_cost$_{x}$\\frac<b>C1"))
    long = MadeUp(4, 2, prefix="params/" + "x" * 90)
    shown = labels(plots.touched_fraction(long))
    assert shown[0].endswith("C1") or shown[0].endswith("C2")
    assert len(shown) == 3 and all(len(name) <= 34 for name in shown)


def test_given_axes_are_used(directory):
    figure = Figure(figsize=(12, 8))
    every = figure.subplots(3, 2).reshape(-1)
    for ax, plot in zip(every, OF_SAVES):
        assert plot(directory, ax=ax) is figure
    for ax, plot in zip(every[4:], OF_TABLES):
        assert plot(directory, "tables/users", ax=ax) is figure
    figure.canvas.draw()


def test_a_missing_table_or_save_is_a_typed_error():
    ck = MadeUp(4, 2)
    for plot in OF_TABLES:
        with pytest.raises(OptionError, match="'C9': expected one of tables/C1"):
            plot(ck, "C9")
    with pytest.raises(OptionError, match="C9"):
        plots.touched_fraction(ck, ["C9"])
    with pytest.raises(OptionError, match="found 7"):
        plots.drift(ck, "tables/C1", base=7)
    with pytest.raises(OptionError, match="at least 1"):
        plots.activity(ck, "tables/C1", bins=0)
    with pytest.raises(OptionError, match="'tables/C1': expected"):
        plots.drift(MadeUp(0, 0), "tables/C1")


def run(program: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.processes
def test_plots_leave_pyplot_and_jax_alone():
    program = (
        "import sys; from deltackpt.inspect import plots; plots.timeline(()).savefig("
        "'/dev/null', format='png');"
        "print([m for m in ('matplotlib.pyplot', 'jax', 'orbax') if m in sys.modules])"
    )
    assert run(program) == "[]"


@pytest.mark.processes
def test_without_matplotlib_the_error_names_the_extra():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from deltackpt import inspect\n"
        "try: from deltackpt.inspect import plots\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    found = run(program)
    assert found.startswith(MissingExtra.__name__) and 'deltackpt[plots]"' in found
