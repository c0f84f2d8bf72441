# SPDX-License-Identifier: Apache-2.0
"""What is committed in a checkpoint directory, who may write it, and cleanup after kills."""
