# SPDX-License-Identifier: Apache-2.0
"""The devices of these tests: a GPU, and a CPU device that is taken for one.

They run whole as ``JAX_PLATFORMS=cuda,cpu pytest tests/gpu tests/test_device_blocks.py``; without
a GPU only the imitation does.
"""

from __future__ import annotations

import jax
import pytest

from deltackpt.save import extract


@pytest.fixture(params=["gpu", "imitation"])
def device(request, monkeypatch) -> jax.Device:
    """A device whose memory deltackpt takes for its own, not the host's."""
    if request.param == "imitation":
        monkeypatch.setattr(extract, "on_host", lambda array: not isinstance(array, jax.Array))
        return jax.devices("cpu")[0]
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no GPU here: {error}")
