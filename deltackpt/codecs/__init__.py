# SPDX-License-Identifier: Apache-2.0
"""How rows are encoded. numpy only: trainer, service, compaction and notebook share it.

Decode arithmetic is normative: see ``docs/format.md``.
"""

from deltackpt.codecs.codec import Codec, decode_block, get
from deltackpt.codecs.dtypes import dtype_of, stored_dtype

__all__ = ["Codec", "decode_block", "dtype_of", "get", "stored_dtype"]
