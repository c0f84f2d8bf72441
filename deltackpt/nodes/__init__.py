# SPDX-License-Identifier: Apache-2.0
"""What a node holds for others, and the server that hands it out."""
