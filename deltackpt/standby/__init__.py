# SPDX-License-Identifier: Apache-2.0
"""The merge that is kept warm, without Ray."""
