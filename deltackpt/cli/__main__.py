# SPDX-License-Identifier: Apache-2.0
"""``python -m deltackpt.cli``: the command line."""

from deltackpt.cli import main

if __name__ == "__main__":
    main()
