# SPDX-License-Identifier: Apache-2.0
"""Bytes in and out: stores, Zarr arrays through TensorStore, files, durability, digests."""
