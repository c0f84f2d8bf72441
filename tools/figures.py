# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the docs as SVG.

python tools/figures.py docs/assets

Each figure has its own background, so that it is readable on light and dark pages. It follows
`prefers-color-scheme`, and has a title and a description.
"""

from __future__ import annotations

import html
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_RECORD: dict[str, Any] = json.loads((_ROOT / "benchmarks/results/plain.json").read_text())
_MACHINE = "{cpu}, {cores} cores, {memory_gib} GiB".format(**_RECORD["machine"])
_STEPS, _EVERY, _SHARE = re.findall(r"(\d+) steps, .*?(\d+).*?, (\d+%)", _RECORD["sizes"])[0]


def _medians() -> dict[str, dict[str, dict[str, float]]]:
    """Returns the medians of the measured training times, by state, candidate and column."""
    table = _RECORD["tables"]["training"]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for size, name, *cells in table["rows"]:
        values = [statistics.median(cell["values"]) for cell in cells]
        columns = dict(zip(table["columns"][2:], values, strict=True))
        found.setdefault(size, {})[name] = columns
    return found


_STATES = _medians()
_SIZE = list(_STATES)[-1]
_LARGE = _STATES[_SIZE]
_STYLE = """\
svg { --bg: #ffffff; --ink: #1b1f24; --soft: #57606a; --rule: #c4ccd4; --panel: #f2f5f8;
  --base: #2f5fc4; --delta: #0a7d63; --wal: #b4560b; --bad: #c21f30; }
@media (prefers-color-scheme: dark) {
  svg { --bg: #14181d; --ink: #eef1f4; --soft: #a9b4bf; --rule: #4a5562; --panel: #20272f;
    --base: #86aaff; --delta: #4fd1ae; --wal: #f7a35c; --bad: #ff8a90; } }
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.small { font-size: 12.5px; } .soft { fill: var(--soft); } .bold { font-weight: 600; }
.head { font-size: 16px; font-weight: 600; } .on { fill: var(--bg); font-weight: 600; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.bg { fill: var(--bg); } .panel { fill: var(--panel); stroke: var(--rule); }
.base { fill: var(--base); } .delta { fill: var(--delta); } .wal { fill: var(--wal); }
.bad { fill: var(--bad); } .none { fill: var(--soft); }
.line { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.rule { fill: none; stroke: var(--rule); } .dash { stroke-dasharray: 5 4; }
.line-base { fill: none; stroke: var(--base); stroke-width: 2.5; }
.line-delta { fill: none; stroke: var(--delta); stroke-width: 2.5; }
.line-wal { fill: none; stroke: var(--wal); stroke-width: 2.5; }
.line-bad { fill: none; stroke: var(--bad); stroke-width: 3; }
.head-of-arrow { fill: var(--soft); }"""


class Drawing:
    """An SVG under construction."""

    def __init__(self, name: str, width: int, height: int, title: str, description: str) -> None:
        self.name = name
        self.width, self.height = width, height
        self.title, self.description = title, description
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Adds text with its baseline at y."""
        shown = html.escape(words, quote=False)
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{_class(kind)}>{shown}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, radius: float = 6
    ) -> None:
        """Adds a filled rectangle."""
        self.parts.append(
            f'<rect x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}" '
            f'rx="{radius:g}"{_class(kind)}/>'
        )

    def path(
        self, points: list[tuple[float, float]], kind: str = "line", arrow: bool = False
    ) -> None:
        """Adds a line through points."""
        route = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        end = f' marker-end="url(#{self.name}-arrow)"' if arrow else ""
        self.parts.append(f'<polyline points="{route}"{_class(kind)}{end}/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """Adds a dot to a curve."""
        self.parts.append(f'<circle cx="{x:.5g}" cy="{y:.5g}" r="5"{_class(kind)}/>')

    def svg(self) -> str:
        """Returns the text of the file."""
        name = self.name
        return "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" '
                f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" role="img" aria-labelledby="{name}-title {name}-desc">',
                f'<title id="{name}-title">{html.escape(self.title)}</title>',
                f'<desc id="{name}-desc">{html.escape(self.description)}</desc>',
                "<!-- SPDX-License-Identifier: Apache-2.0; drawn by tools/figures.py -->",
                f"<style>\n{_STYLE}\n</style>",
                f'<defs><marker id="{name}-arrow" viewBox="0 0 10 10" refX="9" refY="5" '
                'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
                '<path d="M0 0 10 5 0 10z" class="head-of-arrow"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="8" class="bg"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def how_it_works() -> Drawing:
    """Draws the data flow of save(), append() and restore_latest()."""
    drawing = Drawing(
        "how-it-works",
        800,
        400,
        "How deltackpt works",
        "A training process holds embedding tables with optimizer slots, dense leaves and a record of the touched rows. "
        "save() occasionally writes a base with every row, and otherwise a delta with the touched rows. append() adds a "
        "record to the write-ahead log between saves. Everything is written to a local directory, optionally copied to the "
        "memory of peers, and uploaded to a bucket in the background. restore_latest() merges base, deltas and WAL records.",
    )
    drawing.text(24, 34, "Training process", "head")
    drawing.box(24, 50, 190, 206, "panel")
    for y, words in ((80, "embedding tables"), (102, "optimizer slots"), (124, "dense leaves")):
        drawing.text(40, y, words)
    drawing.path([(40, 142), (198, 142)], "rule")
    drawing.text(40, 168, "touched rows", "bold")
    for row in range(12):
        touched = row in (2, 3, 8)
        drawing.box(40 + 13 * row, 182, 10, 26, "delta" if touched else "none", 2)
    drawing.text(40, 236, "3 of 12 rows changed", "small soft")

    drawing.text(306, 34, "Checkpoint directory", "head")
    for y, height, kind, name, holds in (
        (50, 82, "base", "Base", "every row, occasionally"),
        (146, 48, "delta", "Delta", "touched rows, dense leaves"),
        (208, 48, "wal", "WAL record", "the changes of a step"),
    ):
        drawing.box(306, y, 220, height, kind)
        drawing.text(318, y + height / 2 - 3, name, "on")
        drawing.text(318, y + height / 2 + 15, holds, "on small")
        drawing.path([(214, y + height / 2), (300, y + height / 2)], arrow=True)
        call = "append()" if kind == "wal" else "save()"
        drawing.text(257, y + height / 2 - 8, call, "code middle")

    drawing.text(600, 34, "Where it is stored", "head")
    for y, name, detail in (
        (50, "Local", "disk or staging directory"),
        (126, "Peers (optional)", "memory of other nodes"),
        (202, "Bucket (optional)", "S3, GCS or Azure"),
    ):
        drawing.box(600, y, 180, 54, "panel")
        drawing.text(614, y + 23, name, "bold")
        drawing.text(614, y + 42, detail, "small soft")
    drawing.path([(526, 77), (594, 77)], arrow=True)
    drawing.path([(526, 77), (562, 77), (562, 153), (594, 153)], arrow=True)
    drawing.path([(562, 153), (562, 229), (594, 229)], arrow=True)
    drawing.text(600, 276, "copied in the background", "small soft")

    drawing.box(24, 312, 756, 66, "panel")
    drawing.text(44, 340, "restore_latest()", "code bold")
    drawing.text(44, 361, "after a kill", "small soft")
    x = 200.0
    for width, kind, name in (
        (74, "base", "base"),
        (62, "delta", "delta"),
        (62, "delta", "delta"),
        (50, "wal", "WAL"),
    ):
        drawing.box(x, 328, width, 34, kind)
        drawing.text(x + width / 2, 350, name, "on small middle")
        x += width + 26
        if name != "WAL":
            drawing.text(x - 13, 350, "+", "middle")
    drawing.path([(x - 18, 345), (x + 22, 345)], arrow=True)
    drawing.text(x + 32, 350, "the state, bit for bit", "bold")
    return drawing


def timeline() -> Drawing:
    """Draws saves and WAL records over time, a kill, and the steps to repeat."""
    drawing = Drawing(
        "timeline",
        800,
        340,
        "Base, deltas and WAL records over time, with a kill and its recovery point",
        "Training saves a base at step 0 and deltas at steps 100, 200 and 300, and appends a WAL record every ten steps. It is killed at "
        "step 357. With the WAL it resumes from step 350 and repeats 7 steps, with deltas alone from step 300 and repeats 57, "
        "and with the base alone from step 0 and repeats 357.",
    )

    def at(step: float) -> float:
        return 150 + step * 1.54

    drawing.text(24, 34, "An example: a save every 100 steps, a WAL record every 10", "head")
    for y, words in ((92, "save()"), (142, "append()")):
        drawing.text(24, y, words, "code")
    for step in range(0, 360, 100):
        height = 44 if step == 0 else 22
        drawing.box(at(step) - 17, 100 - height, 34, height, "delta" if step else "base", 4)
    drawing.text(at(0) + 24, 68, "base: every row", "small soft")
    drawing.text(at(200), 68, "delta: touched rows", "small soft middle")
    for step in range(10, 357, 10):
        if step % 100:
            drawing.box(at(step) - 3, 124, 6, 22, "wal", 2)
    drawing.path([(at(0), 162), (at(395), 162)], arrow=True)
    for step in (0, 100, 200, 300):
        drawing.path([(at(step), 158), (at(step), 166)])
        drawing.text(at(step), 182, str(step), "small soft middle")
    drawing.text(at(395), 182, "steps", "small soft end")
    drawing.path([(at(357), 56), (at(357), 300)], "line-bad dash")
    drawing.text(at(357) + 8, 66, "killed", "bold bad")
    drawing.text(at(357) + 8, 83, "at step 357", "small bad")

    drawing.text(24, 214, "Steps to repeat", "bold")
    for y, kind, name, step in (
        (230, "wal", "with the WAL", 350),
        (258, "delta", "deltas alone", 300),
        (286, "base", "base alone", 0),
    ):
        drawing.text(24, y + 14, name)
        drawing.box(at(step), y, at(357) - at(step), 18, kind, 3)
        drawing.text(at(357) + 10, y + 14, str(357 - step), "bold")
    drawing.text(at(350) - 10, 244, "recovery point: step 350", "small end")
    drawing.text(at(300) - 10, 272, "newest save: step 300", "small end")
    drawing.text(
        24, 326, "A record counts once it is durable, shortly after append() returns.", "small soft"
    )
    return drawing


def tiers() -> Drawing:
    """Draws which failures each tier survives."""
    drawing = Drawing(
        "tiers",
        800,
        384,
        "What each tier survives",
        "A staging directory in memory survives a killed process only. A staging directory on a disk, and extents, also survive a power cut. "
        "The memory of peers survives the loss of the node, but not of all nodes. A bucket also survives the loss of all nodes, and "
        "of a zone if it is stored in several zones.",
    )
    drawing.text(24, 34, "What each tier survives", "head")
    columns = [
        ("process", "killed"),
        ("power cut", "of the node"),
        ("node", "lost"),
        ("zone", "lost"),
    ]
    for index, (first, second) in enumerate(columns):
        drawing.text(316 + 86 * index, 64, first, "bold middle")
        drawing.text(316 + 86 * index, 81, second, "small soft middle")
    drawing.text(702, 64, "waiting for it", "bold middle")
    drawing.text(702, 81, "option of Tiers", "small soft middle")
    rows = [
        ("Staging directory", "in memory (/dev/shm)", 1, 'wait_for="staging"'),
        ("Staging directory", 'on a disk, durability="power"', 2, 'wait_for="staging"'),
        ("Extents", "preallocated file on a local disk", 2, "always"),
        ("Peers", "memory of other nodes (1)", 3, 'wait_for="peers"'),
        ("Bucket", "S3, GCS, Azure (2)", 4, 'wait_for="remote"'),
    ]
    for index, (name, detail, survived, there) in enumerate(rows):
        y = 96 + 50 * index
        drawing.box(16, y, 768, 44, "panel")
        drawing.text(28, y + 19, name, "bold")
        drawing.text(28, y + 36, detail, "small soft")
        for column in range(4):
            x = 316 + 86 * column
            if column < survived:
                drawing.box(x - 37, y + 9, 74, 26, "delta", 13)
                drawing.text(x, y + 27, "survives", "on small middle")
            else:
                drawing.text(x, y + 27, "lost", "bad small middle")
        kind = "code" if "=" in there else "small"
        drawing.text(702, y + 27, there, f"{kind} middle")
    drawing.text(
        24,
        368,
        "(1) as many nodes as the copies or the erasure code allow; (2) a zone only if the bucket is stored in several",
        "small soft",
    )
    return drawing


#: Training time lost per save of the larger state; the run's own base is included.
_DELTA_SECS, _TUNED_SECS, _DEFAULTS_SECS = (
    max(0.001, _LARGE[name]["lost per save"])
    for name in ("deltackpt, `TouchState`", "Orbax tuned", "Orbax defaults")
)
_BASE_EVERY = 50
_MTBF_SECS = 6 * 3600.0


def lost_work() -> Drawing:
    """Plots time lost against the save interval, by the first-order model of Young and Daly."""
    delta = (_DELTA_SECS * (_BASE_EVERY - 1) + _TUNED_SECS) / _BASE_EVERY
    drawing = Drawing(
        "lost-work",
        800,
        430,
        "Training time lost against the interval between saves",
        "With a failure every six hours, the time lost to saves and repeated work is smallest at an interval that depends on the cost of a save. "
        + "; ".join(
            f"{name}: {_percent(_overhead(cost, _best(cost)))} at {_best(cost):.0f} s"
            for name, cost in (
                ("deltas", delta),
                ("full checkpoints with Orbax tuned", _TUNED_SECS),
                ("full checkpoints with Orbax defaults", _DEFAULTS_SECS),
            )
        )
        + ".",
    )
    left, right, top, bottom = 70, 590, 76, 356
    shortest, longest, most = 10.0, 3600.0, 0.05

    def x_at(secs: float) -> float:
        return left + (right - left) * math.log(secs / shortest) / math.log(longest / shortest)

    def y_at(share: float) -> float:
        return bottom - (bottom - top) * share / most

    drawing.text(
        24, 34, "Time lost to saves and repeated work, with a failure every 6 hours", "head"
    )
    drawing.text(24, 56, "share of training time", "small soft")
    for percent in range(0, 6):
        y = y_at(percent / 100)
        drawing.path([(left, y), (right, y)], "rule")
        drawing.text(left - 10, y + 4, f"{percent}%", "small soft end")
    for secs, name in (
        (10, "10 s"), (30, "30 s"), (60, "1 min"), (300, "5 min"), (900, "15 min"), (3600, "1 h"),
    ):  # fmt: skip
        drawing.path([(x_at(secs), bottom), (x_at(secs), bottom + 5)])
        drawing.text(x_at(secs), bottom + 21, name, "small soft middle")
    drawing.text((left + right) / 2, bottom + 42, "interval between saves", "small middle")
    for kind, name, cost, label_y in (
        ("wal", "Orbax defaults", _DEFAULTS_SECS, 120),
        ("base", "Orbax tuned", _TUNED_SECS, 190),
        ("delta", "deltackpt deltas", delta, 260),
    ):
        points = []
        for index in range(121):
            secs = shortest * (longest / shortest) ** (index / 120)
            if (share := _overhead(cost, secs)) <= most:
                points.append((x_at(secs), y_at(share)))
        drawing.path(points, f"line-{kind}")
        best = _best(cost)
        drawing.dot(x_at(best), y_at(_overhead(cost, best)), kind)
        drawing.text(612, label_y, name, f"bold {kind}")
        drawing.text(612, label_y + 18, f"{cost:.2f} s lost per save", "small soft")
        drawing.text(
            612,
            label_y + 35,
            f"minimum: {_percent(_overhead(cost, best))} at {best:.0f} s",
            "small",
        )
    drawing.text(
        24,
        bottom + 64,
        f"First order, without restores. Commit {_RECORD['commit']}: {_SIZE} state, "
        f"{_SHARE} of the rows changed, 2 cores; one base in {_BASE_EVERY} saves.",
        "small soft",
    )
    return drawing


def _overhead(save_secs: float, interval_secs: float) -> float:
    """First-order cost: saves, and half an interval repeated per failure."""
    return save_secs / interval_secs + interval_secs / 2 / _MTBF_SECS


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _best(save_secs: float) -> float:
    """Young's interval."""
    return math.sqrt(2 * save_secs * _MTBF_SECS)


def break_even() -> Drawing:
    """Plots bytes per save against the fraction of rows touched, for state W of the benchmarks."""
    rows, width, dense = 4_000_000, 64, 5.0
    full_row = width * 4 + 4  # float32 values, one float32 slot
    row_id = 4  # uint32 gaps before compression
    coded_row = width // 2 + 2 + 2 + 4  # int4 codes, fp16 scale and offset, the slot
    full = dense + rows * full_row / 1e6
    bound = 0.8  # max_delta_ratio

    def raw(fraction: float) -> float:
        return dense + fraction * rows * (full_row + row_id) / 1e6

    def coded(fraction: float) -> float:
        return dense + fraction * rows * (coded_row + row_id) / 1e6

    even = full_row / (full_row + row_id)
    turns = bound * full_row / (full_row + row_id)
    drawing = Drawing(
        "break-even",
        800,
        430,
        "Size of a save by the fraction of rows touched",
        f"For 4 million rows of 64 float32 values with a float32 slot and 5 MB of dense leaves, a full checkpoint is {full:,.0f} MB. "
        f"A delta of 5% of the rows is at most {raw(0.05):.0f} MB, or {coded(0.05):.0f} MB with int4. Deltas break even at {_percent(even)} of the rows; "
        f"by default, a base is written above about {100 * turns:.0f}%.",
    )
    left, right, top, bottom = 80, 600, 76, 356
    most = 1200.0

    def x_at(fraction: float) -> float:
        return left + (right - left) * fraction

    def y_at(megabytes: float) -> float:
        return bottom - (bottom - top) * megabytes / most

    drawing.text(24, 34, "Size of a save by the fraction of rows touched since its parent", "head")
    drawing.text(24, 56, "MB per save", "small soft")
    for megabytes in range(0, 1201, 200):
        drawing.path([(left, y_at(megabytes)), (right, y_at(megabytes))], "rule")
        drawing.text(left - 10, y_at(megabytes) + 4, f"{megabytes:,}", "small soft end")
    for percent in (0, 25, 50, 75, 100):
        drawing.text(x_at(percent / 100), bottom + 21, f"{percent}%", "small soft middle")
    drawing.text((left + right) / 2, bottom + 42, "rows touched", "small middle")
    drawing.path([(x_at(turns), y_at(full)), (x_at(turns), bottom)], "line dash")
    drawing.text(x_at(turns) - 8, y_at(330), "by default, a base above this", "small end")
    drawing.text(x_at(turns) - 8, y_at(330) + 17, "(max_delta_ratio=0.8)", "code end")
    drawing.path([(x_at(0), y_at(full)), (x_at(1), y_at(full))], "line-base")
    drawing.path([(x_at(0), y_at(raw(0))), (x_at(1), y_at(raw(1)))], "line-delta")
    drawing.path([(x_at(0), y_at(coded(0))), (x_at(1), y_at(coded(1)))], "line-wal")
    drawing.dot(x_at(0.05), y_at(raw(0.05)), "delta")
    drawing.text(x_at(0.05) - 14, y_at(540), f"5%: {raw(0.05):.0f} MB", "bold")
    drawing.text(
        x_at(0.05) - 14, y_at(540) + 17, f"1/{full / raw(0.05):.0f} of a full save", "small"
    )
    drawing.path([(x_at(0.05), y_at(540) + 24), (x_at(0.05), y_at(raw(0.05)) - 9)], arrow=True)
    drawing.dot(x_at(even), y_at(full), "bad")
    drawing.text(
        x_at(even) - 10, y_at(full) - 12, f"break-even: {_percent(even)} of the rows", "bold end"
    )
    for y, kind, name, detail in (
        (110, "base", "full checkpoint", f"{full_row} bytes per row, all rows"),
        (190, "delta", "delta, raw", f"{full_row} + {row_id} bytes per row"),
        (290, "wal", "delta, int4", f"{coded_row} + {row_id} bytes per row"),
    ):
        drawing.text(618, y, name, f"bold {kind}")
        drawing.text(618, y + 18, detail, "small soft")
    drawing.text(
        24,
        bottom + 64,
        "4 million rows of 64 float32 values, one float32 slot, 5 MB dense leaves. A row index takes 4 bytes before compression.",
        "small soft",
    )
    return drawing


#: Candidates in the record, their names in the figure, and their colors.
_WAYS = (
    ("deltackpt, `TouchState`", "TouchState", "delta"),
    ("deltackpt, fingerprints", "fingerprints", "delta"),
    ("Orbax tuned", "Orbax tuned", "base"),
    ("Orbax defaults", "Orbax defaults", "none"),
)


def cost() -> Drawing:
    """Plots the cost of a save and of a whole run, compared with Orbax."""
    groups = (
        ("Bytes written", "bytes", lambda value: f"{value / 1e6:.0f} MB"),
        ("Time until durable", "durable after", _time),
        ("Training time lost per save", "lost per save", _time),
    )
    drawing = Drawing(
        "cost",
        800,
        486,
        "What checkpoints cost: deltackpt and Orbax",
        f"{_SIZE} state, {_SHARE} of the rows changed. "
        + "; ".join(
            f"{title}: " + ", ".join(f"{name} {unit(_LARGE[key][field])}" for key, name, _ in _WAYS)
            for title, field, unit in groups
        )
        + f". Time of {_STEPS} steps with a save every {_EVERY}, relative to no checkpoints: "
        + "; ".join(
            f"{size} state: "
            + ", ".join(f"{name} {state[key]['training time']:.2f}" for key, name, _ in _WAYS)
            for size, state in _STATES.items()
        )
        + f". Commit {_RECORD['commit']}, {_MACHINE}.",
    )
    drawing.text(24, 34, "Cost of one delta", "head")
    drawing.text(
        24,
        54,
        f"{_SIZE} state, {_SHARE} of the rows changed; green: deltackpt",
        "small soft",
    )
    y = 84
    for title, field, unit in groups:
        drawing.text(24, y, title, "bold")
        most = max(_LARGE[key][field] for key, _, _ in _WAYS)
        for index, (key, name, kind) in enumerate(_WAYS):
            value, top = max(0.0, _LARGE[key][field]), y + 10 + 23 * index
            drawing.text(124, top + 13, name, "small end")
            drawing.box(132, top, max(1, 180 * value / most), 17, kind, 3)
            drawing.text(140 + 180 * value / most, top + 13, unit(value), "small bold")
        y += 124
    drawing.path([(396, 24), (396, 440)], "rule")
    drawing.text(420, 34, "Cost for a training run", "head")
    drawing.text(
        420,
        54,
        f"run time with a save every {_EVERY} steps; 1×: no checkpoints",
        "small soft",
    )
    most = max(state[key]["training time"] for state in _STATES.values() for key, _, _ in _WAYS)
    y, one = 84, 200 / most
    for size, state in _STATES.items():
        drawing.text(420, y, f"{size} state", "bold")
        for index, (key, name, kind) in enumerate(_WAYS):
            value, top = state[key]["training time"], y + 12 + 30 * index
            drawing.text(520, top + 16, name, "small end")
            drawing.box(528, top, one * value, 22, kind, 3)
            drawing.text(536 + one * value, top + 16, f"{value:.2f}×", "small bold")
        drawing.path([(528 + one, y + 6), (528 + one, y + 10 + 30 * len(_WAYS))], "line dash")
        y += 44 + 30 * len(_WAYS)
    drawing.text(
        24,
        468,
        f"Commit {_RECORD['commit']}, {_RECORD['date']}; {_MACHINE}. Tuned: use_compression=False.",
        "small soft",
    )
    return drawing


def _time(secs: float) -> str:
    return f"{secs:.1f} s" if secs >= 1 else f"{secs * 1e3:.0f} ms"


def flowchart() -> Drawing:
    """Draws the choice between bases, deltas and the WAL."""
    questions = (
        ("Do nearly all rows change", "between two saves?", "yes", "Bases only", "save(..., force_base=True)"),
        ("Can you afford to repeat the steps", "since the last delta?", "yes", "Deltas", "save()"),
        ("Does a single training step", "touch most rows of a table?", "yes", "Deltas, more often", "save()"),
        ("Does the disk with the WAL", "survive the failures you expect?", "no", "WAL on another disk, or tiers", "LocalWal(directory=...)"),
    )  # fmt: skip
    drawing = Drawing(
        "flowchart",
        800,
        478,
        "Bases, deltas or the write-ahead log",
        " ".join(
            f"{first} {second} If {answer}: {what}." for first, second, answer, what, _ in questions
        )
        + " Otherwise: the WAL between deltas, with append() at every step or every few steps.",
    )
    for index, (first, second, answer, what, call) in enumerate(questions):
        y = 24 + 92 * index
        drawing.box(24, y, 330, 62, "panel", 31)
        drawing.text(189, y + 27, first, "middle")
        drawing.text(189, y + 46, second, "middle")
        drawing.path([(354, y + 31), (474, y + 31)], arrow=True)
        drawing.text(414, y + 23, answer, "small bold middle")
        kind = ("base", "delta", "delta", "wal")[index]
        drawing.box(480, y, 296, 62, kind)
        drawing.text(500, y + 27, what, "on")
        drawing.text(500, y + 47, call, "on code")
        drawing.path([(189, y + 62), (189, y + 90)], arrow=True)
        drawing.text(201, y + 81, "no" if answer == "yes" else "yes", "small bold")
    y = 24 + 92 * 4
    drawing.box(24, y, 330, 62, "wal")
    drawing.text(189, y + 27, "WAL between deltas", "on middle")
    drawing.text(189, y + 47, "append(), occasional save()", "on code middle")
    return drawing


_FIGURES: tuple[Callable[[], Drawing], ...] = (
    how_it_works, timeline, tiers, lost_work, break_even, cost, flowchart,
)  # fmt: skip


def figures() -> dict[str, str]:
    """Returns the text of each figure by file name."""
    return {f"{drawing.name}.svg": drawing.svg() for drawing in (draw() for draw in _FIGURES)}


def main() -> None:
    """Runs the command line."""
    for name, text in figures().items():
        Path(sys.argv[1], name).write_text(text)


if __name__ == "__main__":
    main()
