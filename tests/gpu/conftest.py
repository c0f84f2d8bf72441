# SPDX-License-Identifier: Apache-2.0
"""Devices for these tests: a GPU, and a CPU device that imitates one.

To run all of them: ``JAX_PLATFORMS=cuda,cpu pytest tests/gpu tests/test_device_blocks.py``; without
a GPU, only the imitation runs.
"""

from __future__ import annotations

import jax
import pytest

from deltackpt.save import capture


@pytest.fixture(params=["gpu", "imitation"])
def device(request, monkeypatch) -> jax.Device:
    """A device whose memory deltackpt treats as device memory, not host memory."""
    if request.param == "imitation":
        monkeypatch.setattr(capture, "on_host", lambda array: not isinstance(array, jax.Array))
        return jax.devices("cpu")[0]
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU here: {error}")
