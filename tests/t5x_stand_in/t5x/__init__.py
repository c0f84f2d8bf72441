# SPDX-License-Identifier: Apache-2.0
"""Stands in for T5X, which is on no package index: what our drop-in uses, with T5X's signatures.

``tests/t5x_signatures.json`` records the signatures of the real package. This code is ours, and it
does only what the tests of the drop-in need.
"""
