# SPDX-License-Identifier: Apache-2.0
"""Writes the table of l2 errors that PyTorch's optimized quantization parameters reach.

PyTorch is not a dependency: run this in an environment that has it, ``pip install torch numpy``,
then ``python tests/oracles/make_oracles.py``, and commit ``quantization.json``.
``trained_rows.npy`` has rows of a DLRM's tables after 150 steps of the example's traffic (Zipf,
exponent 1.07), drawn at random from those that the last ten steps touched.

Source of the method: ``torch.choose_qparams_optimized`` (a greedy search with 200 bins over 16 % of
the range), with scale and offset in float16 as in fbgemm's fused row-wise embeddings.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
TABLE = HERE / "quantization.json"
BITS = (2, 3, 4, 8)
BINS, RATIO = 200, 0.16


def inputs() -> dict[str, np.ndarray]:
    """Float32 rows (n, width) by name; the same if numpy's generators draw the same."""
    draw = np.random.Generator(np.random.PCG64(20211))
    shape = (500, 64)
    return {
        "gaussian": draw.normal(size=shape).astype(np.float32),
        "gaussian of 16": draw.normal(size=(500, 16)).astype(np.float32),
        "heavy-tailed (Student t, 3)": draw.standard_t(3, size=shape).astype(np.float32),
        "heavy-tailed (Laplace)": draw.laplace(size=shape).astype(np.float32),
        "uniform of 0.01": (draw.random(size=shape) * 0.01).astype(np.float32),
        "trained": np.load(HERE / "trained_rows.npy"),
    }


def digest(rows: np.ndarray) -> str:
    """SHA-256 of the rows' bytes."""
    return hashlib.sha256(rows.tobytes()).hexdigest()


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    def error(row: np.ndarray, bits: int) -> float:
        tensor = torch.from_numpy(row)
        high, low = torch.choose_qparams_optimized(tensor, tensor.numel(), BINS, RATIO, bits)
        offset = np.float32(np.float16(np.float32(low.item())))
        levels = 2**bits - 1
        scale = np.float32(np.float16((np.float32(high.item()) - offset) / levels))
        codes = np.clip(np.rint((row - offset) / scale), 0, levels).astype(np.float32)
        return float(np.linalg.norm((codes * scale + offset - row).astype(np.float64)))

    table = {
        "made by": "tests/oracles/make_oracles.py",
        "torch": torch.__version__,
        "method": f"choose_qparams_optimized, {BINS} bins, ratio {RATIO}",
        "mean l2 error": {
            name: {
                "sha256": digest(rows),
                **{str(bits): float(np.mean([error(row, bits) for row in rows])) for bits in BITS},
            }
            for name, rows in inputs().items()
        },
    }
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
