# SPDX-License-Identifier: Apache-2.0
"""Bytes in and out: Zarr arrays through TensorStore, files, durability, row gaps."""
