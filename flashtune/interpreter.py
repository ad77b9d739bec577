"""The kernel's arithmetic without a GPU: Triton's interpreter on a small ragged problem.

Run as a process of its own (``python -m flashtune.interpreter``), because TRITON_INTERPRET must be
set before triton is first imported and nothing compiles under it. bf16 is not tried: the
interpreter returns garbage in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from flashtune.kernels import KERNELS, Kernel, find_kernel, load_kernel
from flashtune.records import Config, Problem
from flashtune.results import Check

DTYPES = ("fp16", "fp32")
CONFIG = Config(32, 16, 4, 2)
_TIMEOUT_S = 600


def small_problem(problem: Problem, dtype: str) -> Problem:
    """Ragged on both axes, with ``problem``'s D, mask and heads a group, in ``dtype``."""
    group = problem.H // problem.H_kv
    N_k = 77 if problem.N == problem.N_k else 53
    return replace(problem, B=1, H=group, H_kv=1, N=77, N_k=N_k, dtype=dtype)


def check_arithmetic(
    kernel: Kernel, problems: Sequence[Problem]
) -> dict[tuple[Problem, str], Check | str]:
    """The check of one interpreted launch for each problem in fp16 and fp32, or why there is none.

    A Triton whose interpreter fails here (3.6 with numpy 2.4) gives the reason, not a verdict.
    """
    asked = [(problem, dtype) for problem in problems for dtype in DTYPES]
    if kernel.gluon:
        return dict.fromkeys(asked, f"{kernel.name} is Gluon, which Triton cannot interpret")
    request = {
        "kernel": kernel.name if kernel.name in KERNELS else str(kernel.path),
        "problems": [asdict(small_problem(problem, dtype)) for problem, dtype in asked],
    }
    done = subprocess.run(
        [sys.executable, "-m", "flashtune.interpreter", json.dumps(request)],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    checks: list[Check | str] = [
        answer["failed"] if "failed" in answer else Check(**answer) for answer in answers
    ]
    died = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
    checks += [died] * (len(asked) - len(checks))
    return dict(zip(asked, checks, strict=True))


def _main(request: str) -> None:
    from flashtune.check import (
        check,
        guarded_inputs,
        guarded_outputs,
        random_inputs,
        references,
    )
    from flashtune.kernels.launch import forward

    asked = json.loads(request)
    kernel = find_kernel(asked["kernel"])
    jit_function = load_kernel(kernel).flash_fwd_kernel
    for fields in asked["problems"]:
        problem = Problem(**fields)
        inputs = random_inputs(problem, "cpu")
        refs = references(problem, inputs)
        guarded, outputs = guarded_inputs(inputs), guarded_outputs(problem, "cpu")
        q, k, v, o, lse = guarded.q, guarded.k, guarded.v, outputs.o, outputs.lse
        try:
            forward(kernel, jit_function, q, k, v, o, lse, problem.causal, CONFIG)
            answer = asdict(check(refs, outputs))
        except Exception as error:  # one dtype's failure says nothing about the other
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1])
