# SPDX-License-Identifier: Apache-2.0
"""In-memory stand-ins for checkpoint directories of any size, for tests of plots and reports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from deltackpt import events
from deltackpt.errors import Damaged
from deltackpt.inspect.descriptions import Wal
from deltackpt.storage.store import FileStore, StorePath

#: Number of different deltas; many saves share the same figures.
_VARIANTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeUpSave:
    """Stand-in for ``deltackpt.inspect.Save``."""

    step: int
    kind: str
    parent: int | None
    chain_length: int
    nbytes: int
    disk_bytes: int
    rows: int
    table_rows: dict[str, int]
    tables: tuple[events.TableFigures, ...]
    reason: str = "made up"
    committed_at: float | None = None
    compacted: bool = False
    problem: str = ""
    dense_nbytes: int | None = None
    dense_codecs: tuple[str, ...] = ()

    @property
    def total_rows(self):
        return sum(self.table_rows.values())


class MadeUp:
    """Stand-in for ``deltackpt.inspect.Checkpoints``: deltas, with a base every few saves."""

    store_path = StorePath(FileStore(Path("made")), "up")
    item = "embeddings"

    def __init__(
        self,
        saves: int,
        tables: int,
        *,
        every: int = 20,
        base_every: int = 40,
        codec: str = "raw",
        prefix: str = "tables/",
        one_shot: bool = False,
        seed: int = 0,
    ):
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self.shapes = {
            f"{prefix}C{i + 1}": (int(10 ** self._rng.uniform(2, 5)), 16) for i in range(tables)
        }
        self._share = {name: 10 ** self._rng.uniform(-2.5, -0.1) for name in self.shapes}
        some = {
            kind: [
                tuple(self._figures(name, kind, codec) for name in self.shapes)
                for _ in range(_VARIANTS)
            ]
            for kind in ("base", "delta")
        }
        made: list[MadeUpSave] = []
        for number in range(saves):
            place = number % base_every
            kind = "base" if place == 0 else "delta"
            figures = some["base"][0] if kind == "base" else some["delta"][number % _VARIANTS]
            nbytes = sum(one.nbytes for one in figures)
            back = place if one_shot else 1
            made.append(
                MadeUpSave(
                    step=(number + 1) * every,
                    kind=kind,
                    parent=(number + 1 - back) * every if place else None,
                    chain_length=min(place, 1) if one_shot else place,
                    nbytes=nbytes,
                    disk_bytes=nbytes + 40_000,
                    rows=sum(one.rows for one in figures),
                    table_rows={name: rows for name, (rows, _) in self.shapes.items()},
                    tables=figures,
                    committed_at=1.8e9 + 30 * number,
                )
            )
        self.saves = tuple(made)

    def _figures(self, name, kind, codec):
        shape = self.shapes[name]
        share = 1.0 if kind == "base" else self._share[name] * self._rng.uniform(0.7, 1.3)
        rows = int(shape[0] * min(1.0, share))
        lossy = kind == "delta" and codec != "raw"
        error = 10 ** self._rng.normal(-1.5, 0.05) * self._share[name] ** 0.2 if lossy else 0.0
        return events.TableFigures(
            table=name,
            field="values",
            codec=codec if lossy else "raw",
            reason="asked for",
            rows=rows,
            nbytes=rows * 64 // (4 if lossy else 1) + 9,
            ratio=0.25 if lossy else 1.0,
            relative_error=error,
        )

    @property
    def steps(self):
        return [save.step for save in self.saves]

    @property
    def newest(self):
        return self.steps[-1] if self.saves else None

    @property
    def wal(self):
        return Wal(epochs=())

    def with_save(self, number: int, **changes):
        """Changes one save and returns this directory."""
        saves = list(self.saves)
        saves[number] = dataclasses.replace(saves[number], **changes)
        self.saves = tuple(saves)
        return self

    def at(self, step=None):
        save = self.saves[-1 if step is None else self.steps.index(step)]
        if save.problem:
            raise Damaged(f"step {save.step}", "a manifest", "no such file")
        tables = {
            name: SimpleNamespace(
                name=name,
                shape=shape,
                dtype=np.dtype(np.float32),
                row_bytes=64,
                slots={"accumulator": None},
            )
            for name, shape in self.shapes.items()
        }
        place = self.saves.index(save)
        chain = self.steps[place - save.chain_length : place + 1]
        return SimpleNamespace(step=save.step, chain=chain, tables=tables, dense={}, dense_saved=())

    def touched(self, step, *, tables=None):
        rng = np.random.default_rng([self._seed, step])
        found = {}
        for one in self.saves[self.steps.index(step)].tables:
            first = rng.integers(0, self.shapes[one.table][0] - one.rows + 1)
            found[one.table] = first + np.arange(one.rows)
        return found

    def history(self, table, rows, *, steps):
        rng = np.random.default_rng(self._seed)
        moves = rng.normal(size=(len(self.saves), len(rows), self.shapes[table][1])) * 0.01
        moves *= rng.random((1, len(rows), 1)) < 0.8
        values = np.cumsum(moves, axis=0).astype(np.float32)
        return SimpleNamespace(steps=np.array(steps), values=values[np.isin(self.steps, steps)])
