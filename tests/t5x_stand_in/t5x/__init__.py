# SPDX-License-Identifier: Apache-2.0
"""Stand-in for T5X, which is not on a package index: the API that our drop-in uses.

``tests/t5x_signatures.json`` records the signatures of the real package. This code is ours and
implements only what the tests of the drop-in need.
"""
