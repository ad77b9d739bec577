"""A GPU process without a GPU: times that were recorded on an H200, and faults on demand.

``serve`` takes the place of ``flashtune.worker.serve`` in a real spawned process, behind the real
calls, so that what the parent does about a hang, an abort or a lost context is what it does on a
card. FLASHTUNE_FAKE names a folder: ``faults.json`` in it says what each config does, and
``calls.txt`` gets a line for each call.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from conftest import ROOT

from flashtune.errors import FlashtuneError
from flashtune.kernels import Kernel
from flashtune.records import Config, Problem, Status
from flashtune.results import Check, Checked, Conditions, SdpaTiming, Timing
from flashtune.store import read

RECORDED = ROOT / "sweeps" / "h200_v6_heads_first_bf16_D64.parquet"
NOISE = 0.003
ROUND_S = 0.01
SETTLES_AFTER = 0.5  # seconds into the rounds, where a power cap is planted


class LostContext(Exception):
    """As a sticky CUDA error: every later call fails too."""


class FakeWorker:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        faults = folder / "faults.json"
        self.faults: dict[str, str] = json.loads(faults.read_text()) if faults.exists() else {}
        rows = read(RECORDED).rows
        self.ms = {(r.problem, r.config): r.ms for r in rows if r.ms is not None}
        self.opened: set[Problem] = set()
        self.rng = random.Random(1)
        self.alive = True
        self.rounds_began: float | None = None

    def note(self, call: str, config: Config | None = None) -> None:
        with (self.folder / "calls.txt").open("a") as log:
            log.write(f"{call} {config or ''} {os.getpid()}\n")

    def act(self, config: Config, stage: str) -> None:
        """What the fault planted in ``config`` does at this stage."""
        fault = self.faults.get(str(config), "")
        what, _, when = fault.partition("@")
        if not what or (when or "check") != stage:
            return
        if what == "abort":
            os.abort()
        if what == "once" and not (self.folder / "once").exists():
            (self.folder / "once").touch()
            os.abort()
        if what == "later":  # the second time
            if (self.folder / "later").exists():
                os.abort()
            (self.folder / "later").touch()
        if what == "flaky" and not (self.folder / "flaky").exists():
            (self.folder / "flaky").touch()
            from flashtune.worker import AnswersDiffer

            raise AnswersDiffer(config)
        if what == "hang":
            time.sleep(600)
        if what == "killed":  # by somebody else: an out-of-memory killer, say
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "illegal":
            self.alive = False
            raise LostContext("CUDA error: an illegal memory access was encountered\nmore")
        if what == "memory":
            raise FlashtuneError("the card's memory is too small", "Choose a smaller --B.")

    def open(self, problem: Problem) -> None:
        self.note("open")
        if self.faults.get("open") == "abort":
            os.abort()
        if self.faults.get("open") == f"memory for N={problem.N}":
            raise FlashtuneError(f"{problem}: the card's memory is too small", "A smaller --N.")
        binaries = int(self.faults.get("open after binaries", 0))
        deadline = time.monotonic() + 300
        while len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))) < binaries:
            assert time.monotonic() < deadline, "compiling waits for the GPU process"
            time.sleep(0.05)
        time.sleep(float(self.faults.get("open takes", 0)))
        self.opened.add(problem)

    def sdpa(self, problem: Problem) -> list[SdpaTiming]:
        assert problem in self.opened
        self.note("sdpa")
        if self.faults.get("sdpa") == "abort":
            os.abort()
        return [SdpaTiming("flash", 1.0, None), SdpaTiming("cudnn", None, "refused")]

    def check(self, problem: Problem, config: Config) -> Checked:
        assert problem in self.opened, "the parent has to open a problem in every new process"
        self.note("check", config)
        self.act(config, "check")
        if self.faults.get(str(config)) == "wrong":
            return Checked(Status.WRONG, "O is off", Check(False, "O is off", 0.5, 0.1, 0.2))
        return Checked(None, None, Check(True, None, 0.01, 0.01, 0.001))

    def repeat(self, problem: Problem, config: Config) -> Checked:
        self.note("repeat", config)
        if self.faults.get(str(config)) == "flaky":
            return Checked(Status.WRONG, "its answers differ from launch to launch", None)
        return Checked(None, None, None)

    def time(self, problem: Problem, config: Config) -> Timing:
        self.note("time", config)
        self.act(config, "time")
        samples = self.samples(problem, config, 10)
        ms = sorted(samples)[5]
        return Timing(ms, None, None, samples, (0,) * 10, 1980, datetime.now(UTC))

    def look(
        self, problem: Problem, config: Config, beside: Config | None, launches: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        self.note("look", config)
        self.act(config, "look")
        theirs = () if beside is None else self.samples(problem, beside, launches)
        return self.samples(problem, config, launches), theirs

    def round(
        self, problem: Problem, configs: Sequence[Config], launches: int, turn: int
    ) -> tuple[dict[Config, tuple[float, ...]], Conditions]:
        self.note(f"round of {len(configs)}")
        time.sleep(ROUND_S)
        for config in configs:
            self.act(config, "round")
        samples = {config: self.samples(problem, config, launches) for config in configs}
        return samples, self.conditions()

    def conditions(self) -> Conditions:
        """Cool; or, with a power cap, hot after a tenth of a second and steady after another
        while. Until then the config that the fault names is 2% faster."""
        hot_after = 0.1
        if "power cap" not in self.faults:
            return Conditions(1980, 400.0, 50, "none")
        self.rounds_began = self.rounds_began or time.monotonic()
        spent = time.monotonic() - self.rounds_began
        if spent > SETTLES_AFTER:
            self.faults[f"{self.faults['power cap']} factor"] = "1.0"
            return Conditions(1700, 690.0, 60, "power cap")
        self.faults[f"{self.faults['power cap']} factor"] = "0.98"
        return Conditions(1980, 500.0, 55, "power cap" if spent > hot_after else "none")

    def samples(self, problem: Problem, config: Config, count: int) -> tuple[float, ...]:
        slow = float(self.faults.get(f"{config} factor", 1.0))
        ms = self.ms.get((problem, config), 1.0) * slow
        return tuple(ms * (1 + self.rng.gauss(0, NOISE)) for _ in range(count))

    def still_works(self) -> bool:
        return self.alive


def serve(connection: Connection, kernel: Kernel) -> None:
    from flashtune.worker import answer_calls

    answer_calls(connection, FakeWorker(Path(os.environ["FLASHTUNE_FAKE"])))
