# SPDX-License-Identifier: Apache-2.0
"""Reads committed saves and merges their rows into buffers; without jax."""
