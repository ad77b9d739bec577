"""What several test files share."""

from __future__ import annotations

import fcntl
import functools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flashtune

ROOT = Path(__file__).resolve().parent.parent
# The folder that holds the flashtune under test, installed or not: for subprocesses.
PACKAGE_PARENT = Path(flashtune.__file__).resolve().parent.parent


@functools.cache
def _gpu_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _gpu_is_available():
        pytest.skip("needs a GPU")


def subprocess_env(**changes: str) -> dict[str, str]:
    """This environment with flashtune importable and ``changes`` made, for a child process."""
    parts = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(part for part in parts if part)
    return {**os.environ, "PYTHONPATH": path, **changes}


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def stop_compile_pool() -> None:
    """Drop the reusable workers: they keep the environment they were started with."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor(max_workers=1).shutdown(wait=True, kill_workers=True)


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """Where ``once`` keeps what it calls ``name``."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the workers' own folders lie side by side in it
    return base / name


def once(factory: pytest.TempPathFactory, name: str, produce: Callable[[Path], Any]) -> Any:
    """What ``produce(folder)`` returns, asked once in a run, however many workers pytest-xdist has.

    For what many tests look at and what takes long to make.
    """
    folder = shared_folder(factory, name)
    folder.mkdir(exist_ok=True)
    result = folder / "result.pickle"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            made = pickle.dumps(produce(folder))
            result.write_bytes(made)
        return pickle.loads(result.read_bytes())


def processes_with(marker: str) -> list[int]:
    """Ids of the living processes whose environment or command line holds ``marker``, but ours."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if marker.encode() in said:
            found.append(int(entry.name))
    return found


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty Triton cache of the test's own, in this process and in new compile workers."""
    folder = tmp_path / "triton-cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    stop_compile_pool()
    yield folder
    stop_compile_pool()


@pytest.fixture(scope="session")
def h200_landscape() -> Path:
    """The recorded H200 landscape: every config of the article space timed, four shapes.

    It is not part of the repository, so tests that judge rules by it are skipped without it.
    """
    name = "h200_landscape_v4_bf16_D64.parquet"
    named = os.environ.get("FLASHTUNE_LANDSCAPE")
    places = [ROOT / "shared" / "data" / name, ROOT.parent / "shared" / "data" / name]
    for place in [Path(named)] if named else places:
        if place.is_file():
            return place
    pytest.skip(f"{name} is not here (FLASHTUNE_LANDSCAPE may name it)")
