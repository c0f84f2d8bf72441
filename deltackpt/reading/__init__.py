# SPDX-License-Identifier: Apache-2.0
"""Committed saves, and their rows merged into buffers; without jax."""
