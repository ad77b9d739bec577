"""The data files of configs/: where they are, and reading one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flashtune.errors import FlashtuneError

_PACKAGE = Path(__file__).resolve().parent


def config_dir() -> Path:
    """The folder of the data files: the wheel's flashtune/_configs, or the checkout's configs/.

    Raises FlashtuneError when neither is there.
    """
    # The wheel's copy first: beside an installed package, configs/ could be anyone's.
    for folder in (_PACKAGE / "_configs", _PACKAGE.parent / "configs"):
        if (folder / "gpus.toml").is_file():
            return folder
    raise FlashtuneError(
        f"flashtune's configs are missing beside {_PACKAGE}.", "Install flashtune again."
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of the TOML file ``path``.

    Raises FlashtuneError when it cannot be read or is not TOML, naming the place.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlashtuneError(
            f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise FlashtuneError(f"{path} is not TOML: {error}.", "Save it as UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        raise FlashtuneError(f"{path} is not TOML: {error}.", "Repair that line.") from error
