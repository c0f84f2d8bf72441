# SPDX-License-Identifier: Apache-2.0
"""T5 1.1 in JAX, trained on span corruption, with deltackpt checkpoints."""
