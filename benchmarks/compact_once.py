# SPDX-License-Identifier: Apache-2.0
"""One compaction in a fresh process; prints its memory and time as JSON. Used by ``bases.py``.

python benchmarks/compact_once.py ROOT BYTES
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peak import reset_peak, status_bytes

from deltackpt.upkeep import compact


def main() -> None:
    """Runs the command line."""
    root, memory_bytes = Path(sys.argv[1]), int(sys.argv[2])
    before = status_bytes("VmRSS")
    reset_peak()
    done = compact.compact(root, memory_bytes=memory_bytes)
    assert done is not None
    extra = status_bytes("VmHWM") - before
    print(json.dumps({"extra": extra, "seconds": done.seconds}))


if __name__ == "__main__":
    main()
