"""Compiles configs in a process of its own: ``compile_script.py < request.json``.

The request is {"n_jobs": 2, "jobs": [[kernel, problem's fields, config, cc, timeout_s], …]}; a line
of JSON comes back for each job as it ends: the config, and the fields of its Compiled.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from flashtune.compiler import CompileJob
from flashtune.fan_out import compile_all
from flashtune.kernels import find_kernel
from flashtune.records import Problem
from flashtune.space import parse_config


def main() -> None:
    request = json.load(sys.stdin)
    jobs = [
        CompileJob(find_kernel(kernel), Problem(**fields), parse_config(config), cc, timeout_s)
        for kernel, fields, config, cc, timeout_s in request["jobs"]
    ]
    for job, compiled in compile_all(jobs, request["n_jobs"]):
        facts = {**asdict(compiled), "config": str(job.config)}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
