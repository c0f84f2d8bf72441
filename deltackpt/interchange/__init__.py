# SPDX-License-Identifier: Apache-2.0
"""Exports steps to other checkpoint formats, and imports Orbax checkpoints.

``export_orbax``, ``export_safetensors`` and ``export_parquet`` write a step in formats that other
programs read; ``import_orbax`` turns a stock Orbax checkpoint into the first base of a run. Names
are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltackpt.lazy_import import attributes

if TYPE_CHECKING:
    from deltackpt.interchange.orbax_export import export_orbax
    from deltackpt.interchange.orbax_import import Imported, import_orbax
    from deltackpt.interchange.parquet import export_parquet
    from deltackpt.interchange.target import Exported
    from deltackpt.interchange.tensors import export_safetensors


__all__ = [
    "Exported",
    "Imported",
    "export_orbax",
    "export_parquet",
    "export_safetensors",
    "import_orbax",
]

__getattr__ = attributes(
    __name__,
    {
        "Exported": ".target",
        "Imported": ".orbax_import",
        "export_orbax": ".orbax_export",
        "export_parquet": ".parquet",
        "export_safetensors": ".tensors",
        "import_orbax": ".orbax_import",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
