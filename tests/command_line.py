"""The real command line as a child process, for the test files that drive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import subprocess_env

TARGET = ("--gpu", "rtx-4070-super")
"""Named in every test, so that the tests do the same on a machine that has another card."""


@dataclass
class CommandLine:
    """``flashtune`` run in ``folder``, with a Triton cache that the tests of a session share."""

    folder: Path
    cache: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def at(cls, folder: Path, factory: pytest.TempPathFactory) -> CommandLine:
        """In ``folder``; the cache lies where all workers of a parallel run see it."""
        base = factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:
            base = base.parent
        cache = base / "command-line-triton-cache"
        cache.mkdir(exist_ok=True)
        return cls(folder, cache)

    def run(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run to the end. ``env`` adds variables; other options are subprocess.run's."""
        command, options = self.prepared(args, options)
        options.setdefault("timeout", 300)
        options.setdefault("stdout", subprocess.PIPE)
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, **options)

    def start(self, *args: str, **options: Any) -> Running:
        """Start in a session of its own, as a terminal would; a signal then reaches all of it."""
        command, options = self.prepared(args, options)
        log = self.folder / f"stderr-{uuid.uuid4().hex[:8]}"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                **options,
            )
        return Running(process, log)

    def prepared(
        self, args: tuple[str, ...], options: dict[str, Any]
    ) -> tuple[list[str], dict[str, Any]]:
        env = subprocess_env(TRITON_CACHE_DIR=str(self.cache), FLASHTUNE_TEST_MARK=self.mark)
        # What a developer has set must not change what the tests see.
        for name in ("FLASHTUNE_DEBUG", "NO_COLOR", "FORCE_COLOR", "TRITON_INTERPRET"):
            env.pop(name, None)
        env.update(options.pop("env", {}))
        python = [sys.executable, *options.pop("python", ())]
        return [*python, "-m", "flashtune", *args], {"cwd": self.folder, "env": env, **options}

    def compiled(self) -> int:
        """How many binaries the cache holds. os.walk does not mind folders that vanish meanwhile,
        as Triton's temporary ones do."""
        files = (name for _, _, names in os.walk(self.cache) for name in names)
        return sum(name.endswith(".cubin") for name in files)

    def processes(self) -> dict[int, str]:
        """The living processes that a command of this object started: pid and command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                # A session or group would not do: compilers get groups of their own.
                if f"FLASHTUNE_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    if words:  # a zombie has none
                        found[int(entry.name)] = words.decode(errors="replace")
            except OSError:
                continue
        return found

    def left_behind(self, seconds: float = 10) -> dict[int, str]:
        """The processes that are still there after ``seconds`` of grace."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


@dataclass
class Running:
    """A command that has been started, and the file that its stderr goes to."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def stderr(self) -> str:
        return self.log.read_text()

    def wait_until(self, what: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something that the command does; it must not end before."""
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, f"ended too early: {self.stderr}"
            assert time.monotonic() < deadline, f"never happened: {self.stderr}"
            time.sleep(0.02)

    def wait_for_stage(self, stage: str) -> None:
        self.wait_until(lambda: f"\n{stage}:" in f"\n{self.stderr}")

    def interrupt(self) -> int:
        """Ctrl-C: SIGINT to the whole process group. Returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(60)

    def kill(self) -> None:
        """``kill -9`` of the command alone; its children are left to find out."""
        self.process.kill()
        self.process.wait(60)
