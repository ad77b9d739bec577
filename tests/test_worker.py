"""The GPU worker without a GPU: see interpreted_worker.py. With one: test_sweep_on_gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import subprocess_env
from planted_faults import FAULTS

HERE = Path(__file__).resolve().parent


def outcomes(kernel: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted_worker.py"), kernel],
        env=subprocess_env(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="-1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_a_launch_raises_becomes_a_status_and_the_next_config_goes_on() -> None:
    first, resources, crashed, last = outcomes("v6_heads_first")
    for sound in (first, last):
        assert sound == {"status": "timed", "reason": None, "timed_is_checked": True}
    assert resources["status"] == "out_of_resources"
    assert "262144" in resources["reason"] and "232448" in resources["reason"]
    assert crashed["status"] == "crashed"
    assert crashed["reason"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_wrong_answer_is_never_timed(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "rescale_left_out")
    first, *_ = outcomes(str(fault.write(tmp_path)))
    assert first["status"] == "wrong" and first["timed_is_checked"] is None
