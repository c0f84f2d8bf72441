# SPDX-License-Identifier: Apache-2.0
"""Storage access: stores, Zarr arrays, files, durability, digests."""
