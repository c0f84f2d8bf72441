# SPDX-License-Identifier: Apache-2.0
"""A deep learning recommendation model in JAX that saves with deltackpt."""
