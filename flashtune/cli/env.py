"""``flashtune env``: what a bug report needs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flashtune import __version__
from flashtune.cli.guard import guarded
from flashtune.cli.options import AsJson


@guarded
def command(as_json: AsJson = False) -> None:
    """Print versions, the GPU and the driver, for a bug report.

    Example: flashtune env --json
    """
    import platform

    from flashtune.cli.render import print_facts, write_json
    from flashtune.driver import clocks_now, other_processes
    from flashtune.gpu import present_gpu
    from flashtune.versions import version

    gpu = present_gpu()
    facts: dict[str, Any] = {
        "flashtune": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in ("torch", "triton", "numpy", "pyarrow", "joblib")},
        "gpu": None if gpu is None else gpu.title,
        "driver": None if gpu is None else gpu.driver,
        "cuda": None if gpu is None else gpu.cuda,
    }
    if gpu is not None:
        facts["limits"] = {
            "cc": gpu.cc,
            "sms": gpu.sms,
            "shared_per_sm": gpu.shared_per_sm,
            "shared_per_block": gpu.shared_per_block,
            "l2_bytes": gpu.l2_bytes,
        }
        clocks = clocks_now()
        facts["clocks"] = None if clocks is None else asdict(clocks)
        others = other_processes()
        facts["other_processes"] = None if others is None else len(others)
    if as_json:
        write_json({"schema_version": 1, **facts})
    else:
        print_facts(facts)
