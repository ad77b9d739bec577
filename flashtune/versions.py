"""The versions of what is installed, and whether this Triton will do."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

from flashtune.errors import FlashtuneError

_OLDEST_TRITON = (3, 6)
_TRITON_HINT = "pip install 'triton>=3.6'"


def version(distribution: str) -> str | None:
    """The installed version of ``distribution``; None when it is not installed."""
    # The name of the folder of its metadata says it, and importlib.metadata is slow to load.
    prefix, suffix = f"{distribution}-", ".dist-info"
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.startswith(prefix) and name.endswith(suffix):
                    return name[len(prefix) : -len(suffix)]
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def usable_triton() -> str:
    """The installed Triton's version. Raises FlashtuneError when there is none or it is too old."""
    found = version("triton")
    if found is None:
        raise FlashtuneError("Triton is not installed, so no kernel can be compiled.", _TRITON_HINT)
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _OLDEST_TRITON:
        raise FlashtuneError(f"Triton {found} is too old; 3.6 or newer is needed.", _TRITON_HINT)
    return found
