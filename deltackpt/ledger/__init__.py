# SPDX-License-Identifier: Apache-2.0
"""What is committed in a root, who may write it, and what a cut process left there."""
