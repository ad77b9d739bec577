"""Whether a race's word can be taken: equal copies, copies slowed by 2%, do_bench, and compiling.

    python benchmarks/trials.py [--trials 100] [--only copies|bench|overlap] [--out FILE.json]

copies   Races of two copies of one config, alike, and with one slowed by 2% (a spinning kernel of
         calibrated length inside the timed span): how many were called equal, how many slower.
bench    Medians of ten samples beside triton.testing.do_bench's, in turns, on kernels over 0.2 ms.
overlap  The same configs timed with and without compile workers beside them, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton

from flashtune import race
from flashtune.compiler import CompileJob
from flashtune.fan_out import compile_all, cpus_beside_launches, default_jobs
from flashtune.kernels import DEFAULT_KERNEL, KERNELS
from flashtune.records import Config, Problem
from flashtune.results import Conditions
from flashtune.space import load_space, parse_config
from flashtune.stats import paired_interval
from flashtune.timing import Timer
from flashtune.worker import GpuWorker

KERNEL = KERNELS[DEFAULT_KERNEL]
COPY = 100  # more stages: the same config under another name
SLOWED_BY = 0.02


class Copies(GpuWorker):
    """Launches configs under two names, and one of them with a delay."""

    def __init__(self) -> None:
        self.cycles = 0
        super().__init__(KERNEL, Timer(lambda: None), lambda: Conditions(None, None, None, None))

    def _launcher(self, problem, config, place):  # type: ignore[no-untyped-def]
        original = replace(config, num_stages=config.num_stages % COPY)
        launch = super()._launcher(problem, original, place)
        if config == original or not self.cycles:
            return launch

        def slowed() -> None:
            launch()
            torch.cuda._sleep(self.cycles)
            torch.cuda._sleep(1)  # an odd number of kernels with the flush's: see timing.py

        return slowed


class Both:
    """The race's track over a worker in this process."""

    def __init__(self, worker: Copies, problem: Problem) -> None:
        self.worker, self.problem, self.turn = worker, problem, 0

    def round(self, configs, launches):  # type: ignore[no-untyped-def]
        self.turn += 1
        return self.worker.round(self.problem, configs, launches, self.turn)[0]

    def steady(self) -> bool:
        """One race after the other, on one shape."""
        return True


def problem_of(N: int, causal: bool) -> Problem:
    return Problem(4, 8, 8, N, N, 64, causal, "bf16")


def behind(worker: Copies, problem: Problem, config: Config, copy: Config) -> float:
    """How much slower the copy is, over many rounds in turns."""
    rounds = [worker.round(problem, [config, copy], 16, turn)[0] for turn in range(32)]
    return median(median(r[copy]) / median(r[config]) for r in rounds) - 1


def slow_by(worker: Copies, problem: Problem, config: Config, copy: Config) -> float:
    """Set the delay that slows the copy by SLOWED_BY; how much it is then slower."""
    worker.cycles = 1
    least = behind(worker, problem, config, copy)  # what a second launch costs by itself
    place = worker._at(problem).placements[0]
    ms = median(worker._timer.samples(worker._launcher(problem, config, place), 16))
    worker.cycles = round(SLOWED_BY * ms * 1.5e6)  # at 1.5 GHz
    for _ in range(3):
        added = behind(worker, problem, config, copy) - least
        worker.cycles = max(
            1, round(worker.cycles * (SLOWED_BY - least) / max(added, SLOWED_BY / 10))
        )
    return behind(worker, problem, config, copy)


def copies(trials: int) -> list[dict]:
    config = Config(64, 64, 4, 3)
    copy = replace(config, num_stages=config.num_stages + COPY)
    worker, found = Copies(), []
    for N, causal, slowed in [
        (512, False, False), (512, True, False), (2048, False, False), (4096, True, False),
        (4096, False, True), (4096, True, True), (8192, False, True), (8192, True, True),
    ]:  # fmt: skip
        problem = problem_of(N, causal)
        worker.cycles = 0
        slower = slow_by(worker, problem, config, copy) if slowed else 0.0
        said = {"equal": 0, "copy slower": 0, "original slower": 0, "undecided": 0}
        start, rounds = time.perf_counter(), 0
        for trial in range(trials // 4):
            ran = race.final(Both(worker, problem), [config, copy], random.Random(trial))
            (standing,) = ran.standings
            rounds += len(ran.rounds)
            word = "undecided"
            if standing.out_after is not None:
                word = "copy slower" if standing.config == copy else "original slower"
            elif standing.equal:
                word = "equal"
            said[word] += 1
        seconds = (time.perf_counter() - start) / (trials // 4)
        print(f"{problem}: copy slower by {slower:.2%}: {said}, {rounds / (trials // 4):.1f} rounds"
              f" and {seconds:.2f} s a race", flush=True)  # fmt: skip
        found.append({"problem": str(problem), "slower": slower, **said})
    return found


def bench() -> list[dict]:
    worker, found = Copies(), []
    for N, causal in [(4096, False), (8192, False), (8192, True)]:
        problem = problem_of(N, causal)
        worker.open(problem)
        place = worker._at(problem).placements[0]
        for text in ("64x64x4x3", "128x64x8x3", "64x32x4x2", "128x128x8x2", "32x32x4x4"):
            launch = worker._launcher(problem, parse_config(text), place)
            worker._timer.warm_clocks(launch, 0.5)
            pairs, ms = [], median(worker._timer.samples(launch, 60))

            def both(launch=launch, ms=ms) -> tuple[float, float]:
                """Ten samples of each: in 0.1 s the card's clock drifts by more than 1%."""
                theirs = triton.testing.do_bench(launch, ms, 10 * ms, return_mode="median")
                return median(worker._timer.samples(launch, 10)), theirs

            pairs = [both() for _ in range(30)]
            ratio = median(ours / theirs for ours, theirs in pairs)
            print(f"{problem} {text}: {pairs[-1][0]:.4f} ms, over do_bench {ratio:.4f}", flush=True)
            found.append({"problem": str(problem), "config": text, "ms": pairs[-1][0],
                          "over_do_bench": ratio})  # fmt: skip
    worst = max(abs(f["over_do_bench"] - 1) for f in found if f["ms"] > 0.2)
    print(f"worst difference from do_bench over 0.2 ms: {worst:.2%}")
    return found


def overlap() -> list[dict]:
    worker, found = Copies(), []
    configs = [parse_config(t) for t in ("64x64x4x3", "128x64x8x3", "64x32x4x2", "64x64x4x2")]
    cases = [
        (problem_of(N, c), config) for N, c in [(512, False), (4096, True)] for config in configs
    ]
    medians: dict[bool, list[dict]] = {False: [], True: []}

    def times() -> dict:
        return {
            case: median(ms for turn in range(16)
                         for ms in worker.round(case[0], [case[1]], 32, turn)[0][case[1]])
            for case in cases
        }  # fmt: skip

    times()
    for _ in range(10):
        medians[False].append(times())
        with compiling():
            medians[True].append(times())
    for case in cases:
        logs = [math.log(loud[case] / quiet[case])
                for quiet, loud in zip(medians[False], medians[True], strict=True)]  # fmt: skip
        shift, low, high = paired_interval(logs, [1] * len(logs), 0.95)
        print(f"{case[0]} {case[1]}: {shift:+.2%} ({low:+.2%} to {high:+.2%}) while compiling")
        found.append({"problem": str(case[0]), "config": str(case[1]), "shift": shift,
                      "low": low, "high": high})  # fmt: skip
    return found


class compiling:
    """Compile workers beside what runs inside, on the CPUs that a sweep gives them."""

    def __enter__(self) -> None:
        self._cache = tempfile.TemporaryDirectory()
        os.environ["TRITON_CACHE_DIR"] = self._cache.name
        self._stop, self._busy = threading.Event(), threading.Event()
        cc = "".join(map(str, torch.cuda.get_device_capability()))
        jobs = [CompileJob(KERNEL, problem_of(1024, causal), config, int(cc))
                for causal in (True, False) for config in load_space("article")]  # fmt: skip
        self._thread = threading.Thread(target=self._work, args=(jobs,))
        self._thread.start()
        self._busy.wait()

    def _work(self, jobs: list[CompileJob]) -> None:
        with closing(compile_all(jobs, default_jobs(), cpus=cpus_beside_launches())) as results:
            for _ in results:
                self._busy.set()
                if self._stop.is_set():
                    return

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        del os.environ["TRITON_CACHE_DIR"]
        self._cache.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--only", choices=["copies", "bench", "overlap"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    parts: dict[str, Callable[[], list[dict]]] = {
        "copies": lambda: copies(asked.trials), "bench": bench, "overlap": overlap,
    }  # fmt: skip
    names = [asked.only] if asked.only else list(parts)
    record = {name: parts[name]() for name in names}
    if asked.out is not None:
        asked.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
