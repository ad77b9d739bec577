"""Which choice was right: a long interleaved re-timing of everything that could be.

    python benchmarks/judge.py RESULTS.parquet… [--yardstick FILE.json…] [--seconds 4] [--out F]

For each shape of the results files: what each race chose and could not tell from it, the four
fastest of each exhaustive sweep and of each yardstick, all in rounds of 64 launches in mixed order
on changing copies of the tensors. Prints how far each choice is behind the best of them (`regret`),
and the worst of its tie set.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtune.gpu_process import GpuProcess
from flashtune.kernels import DEFAULT_KERNEL, KERNELS
from flashtune.race import judge, judge_pair
from flashtune.records import Config, Problem, Status
from flashtune.space import parse_config
from flashtune.store import read

LAUNCHES, FASTEST = 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--yardstick", type=Path, nargs="*", default=[])
    parser.add_argument("--autotuned", type=Path, help="JSON lines of triton_autotune.py")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()

    wanted: dict[Problem, set[Config]] = defaultdict(set)
    chosen: dict[Problem, list[tuple[str, Config, set[Config]]]] = defaultdict(list)
    for path in asked.results:
        file = read(path)
        for verdict in file.verdicts:
            ties = {tie.config for tie in verdict.ties} | {verdict.leader}
            chosen[verdict.problem].append((str(path), verdict.chosen, ties))
            wanted[verdict.problem] |= {verdict.chosen, *ties}
        raced = {verdict.problem for verdict in file.verdicts}
        for problem in {row.problem for row in file.rows} - raced:
            timed = [r for r in file.rows if r.problem == problem and r.status is Status.TIMED]
            fastest = [r.config for r in sorted(timed, key=lambda r: r.ms)[:FASTEST]]
            chosen[problem].append((str(path), fastest[0], set()))
            wanted[problem] |= set(fastest)
    for path in asked.yardstick:
        for shape in json.loads(path.read_text())["shapes"]:
            (problem,) = (p for p in wanted if (p.N, p.causal) == (shape["N"], shape["causal"]))
            fastest = sorted(shape["ms"], key=shape["ms"].get)[:FASTEST]
            chosen[problem].append((str(path), parse_config(fastest[0]), set()))
            wanted[problem] |= {parse_config(text) for text in fastest}

    lines = asked.autotuned.read_text().splitlines() if asked.autotuned is not None else []
    for number, line in enumerate(lines):
        for shape, text in json.loads(line)["chosen"].items():
            N, mask = shape.split()
            (problem,) = (p for p in wanted if (p.N, p.causal) == (int(N), mask == "causal"))
            chosen[problem].append((f"autotune {number}", parse_config(text), set()))
            wanted[problem].add(parse_config(text))

    record = []
    with GpuProcess(KERNELS[DEFAULT_KERNEL]) as gpu:
        for problem, configs in wanted.items():
            rounds, rng = [], random.Random(1)
            gpu.sdpa(problem)  # warms the clocks
            end = time.perf_counter() + asked.seconds
            while time.perf_counter() < end or len(rounds) < 8:
                mixed = sorted(configs)
                rng.shuffle(mixed)
                rounds.append(gpu.round(problem, mixed, LAUNCHES, len(rounds))[0])
            best, _ = judge(rounds, sorted(configs))
            behind = {c: judge_pair(rounds, best, c, None) for c in configs}
            print(f"{problem}: best {best}, {len(rounds)} rounds of {len(configs)} configs")
            for source, choice, ties in chosen[problem]:
                own = behind[choice]
                worst = max((behind[tie].behind for tie in ties), default=0.0) - own.behind
                print(
                    f"    {choice!s:12} regret {own.behind:7.2%} ({own.at_least:.2%} to"
                    f" {own.at_most:.2%}), worst of its ties {worst:+.2%}  {source}"
                )
                record.append({"N": problem.N, "causal": problem.causal, "source": source,
                               "choice": str(choice), "best": str(best), "regret": own.behind,
                               "at_most": own.at_most, "worst_tie": worst,
                               "ties": sorted(map(str, ties))})  # fmt: skip
    by_source: dict[str, list[float]] = defaultdict(list)
    for entry in record:
        by_source[entry["source"]].append(entry["regret"])
    for source, regrets in by_source.items():
        mean = sum(regrets) / len(regrets)
        print(f"{source}: {len(regrets)} shapes, worst regret {max(regrets):.2%}, mean {mean:.2%}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
