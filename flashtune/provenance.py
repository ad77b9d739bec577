"""The provenance of a run: the GPU, the versions of what it ran with, and the source's commit."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from flashtune.gpu import GpuSpec
from flashtune.results import Provenance
from flashtune.versions import usable_triton, version

_PACKAGE = Path(__file__).resolve().parent


def provenance(spec: GpuSpec, kernel: str, kernel_hash: str) -> Provenance:
    """Where a run's numbers come from: the GPU's slug, versions, and the source's commit.

    Raises FlashtuneError when Triton is not installed or older than 3.6.
    """
    return Provenance(
        gpu=spec.name,
        cc=spec.cc,
        sms=spec.sms,
        measured=spec.present,
        driver=spec.driver,
        torch=version("torch"),
        triton=usable_triton(),
        cuda=spec.cuda,
        python=platform.python_version(),
        kernel=kernel,
        kernel_hash=kernel_hash,
        sm_clock_mhz=spec.max_sm_clock_mhz,
        mem_clock_mhz=spec.max_mem_clock_mhz,
        power_limit_w=spec.power_limit_w if spec.present else None,
        git_commit=_git_commit(_PACKAGE),
    )


def _git_commit(folder: Path) -> str | None:
    """The commit ``folder`` is checked out at; None when it is not part of a checkout."""

    def git(*args: str) -> str | None:
        # No lock: `git status` takes one to refresh the index, and left behind by a sweep that is
        # killed meanwhile it would stop the user's next commit.
        command = ["git", "--no-optional-locks", "-C", str(folder), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment inside some other checkout is not ours: the file itself must be tracked.
    if git("ls-files", "--error-unmatch", "records.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit
