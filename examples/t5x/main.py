# SPDX-License-Identifier: Apache-2.0
"""Trains a T5 and saves touched-row checkpoints: see ``t5_jax/main.py``."""

from __future__ import annotations

import sys
from pathlib import Path

# Code that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from t5_jax.main import main

if __name__ == "__main__":
    main()
