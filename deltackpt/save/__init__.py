# SPDX-License-Identifier: Apache-2.0
"""What happens to a state that is saved: chosen, copied, encoded, written, committed."""
