# SPDX-License-Identifier: Apache-2.0
"""Kills a T5 trainer in the middle of a save: see ``t5_jax/demo.py``."""

from __future__ import annotations

import sys
from pathlib import Path

# Code that the examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from t5_jax.demo import main

if __name__ == "__main__":
    sys.exit(main())
