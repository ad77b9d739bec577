"""What becomes of a command's errors: two lines and an exit code, never a bare traceback."""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from flashtune.errors import FlashtuneError

P = ParamSpec("P")
R = TypeVar("R")

NO, FAILED, INTERRUPTED = 1, 2, 130
"""Exit codes: the answer is no; usage, environment or internal error; Ctrl-C."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """A command that ends in an exit code: 0, 1 as it raises, 2 for errors, 130 for Ctrl-C."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except FlashtuneError as error:
            _tell(error.message, error.hint)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            _tell("Interrupted.", "What was finished is kept; the same command goes on from there.")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader (head, less) has gone: nobody is left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except typer.Exit:
            raise
        except Exception as error:
            _tell(*_message_and_hint(error))
            raise typer.Exit(FAILED) from error

    return wrapper


def _message_and_hint(error: Exception) -> tuple[str, str]:
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"{error.filename or 'the output'}: {error.strerror}",
            "Free some space or write elsewhere, and run the same command again.",
        )
    return (
        f"Internal error: {type(error).__name__}: {error}",
        "Please report it with the output of FLASHTUNE_DEBUG=1 and of `flashtune env`.",
    )


def _tell(message: str, hint: str) -> None:
    if os.environ.get("FLASHTUNE_DEBUG") == "1":
        traceback.print_exc()
    typer.echo(f"Error: {message}" if message != "Interrupted." else message, err=True)
    typer.echo(hint, err=True)
