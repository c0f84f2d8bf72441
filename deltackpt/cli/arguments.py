# SPDX-License-Identifier: Apache-2.0
"""Arguments shared by several commands."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from deltackpt.format import names

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


class Size(click.ParamType):
    """A size such as ``512MiB``, ``1.5G`` or a plain number of bytes; units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """See ``click.ParamType``."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            self.fail(f"{value!r}: expected a size such as 512MiB or 2GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class UserPath(click.Path):
    """A path whose leading ``~`` is expanded, in case the shell did not."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """See ``click.ParamType``."""
        return super().convert(os.path.expanduser(value), param, ctx)


#: A step number.
STEP = click.IntRange(0, names.LAST_STEP)
#: click does not check readability: the code that reads it reports more precise errors.
directory = click.argument("directory", type=UserPath(file_okay=False, readable=False))
#: A directory, or a bucket URL.
root = click.argument("directory", metavar="DIRECTORY|URL")
item = click.option(
    "--item",
    help="deltackpt's item in each step; detected in the newest step by default.",
    metavar="NAME",
)
endpoint = click.option(
    "--endpoint",
    help="Server of a bucket, if it is not the provider's own.",
    metavar="ADDRESS",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
