# SPDX-License-Identifier: Apache-2.0
"""Codes of second moments: their logarithms to base 2, zero a symbol of its own.

A second moment spans many powers of two within one block: a linear code makes the small ones zero,
and an optimizer that divides by their roots then leaves the model in ruins. A code k of a block
with the top ``t`` stands for ``2**((t - k) / 2**fine)``; the powers between two integers are a
table, so that decoding needs no ``exp2``, whose last bit differs from machine to machine.
"""

from __future__ import annotations

LOGARITHMS: tuple = ()
