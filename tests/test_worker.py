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
    first, resources, crashed, last, *flaky, changed, fresh, astray, next_one = outcomes(
        "v6_heads_first"
    )
    for sound in (first, last):
        assert sound == {
            "word": "done", "failure": None, "reason": None, "repeat": None,
            "look": [[1.0, 1.0], [1.0, 1.0]], "timed": "done", "timed_is_checked": True,
        }  # fmt: skip
    assert (resources["word"], resources["failure"]) == ("failed", "out_of_resources")
    assert "262144" in resources["reason"] and "232448" in resources["reason"]
    assert (crashed["word"], crashed["failure"]) == ("failed", "crashed")
    assert crashed["reason"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    for differing in flaky:  # a round, and a timing by itself
        assert differing["word"] == "failed"
        assert differing["reason"] == "its answers differ from launch to launch on the same inputs"
    assert len(flaky) == 2
    assert changed == {"word": "failed", "reason": "its launch changed the inputs Q, K or V"}
    assert fresh["word"] == "done"  # the next config gets fresh inputs
    assert astray == changed  # whichever copy it stored into, the blame is its own
    assert next_one == {"word": "done", "reason": None}


def test_a_wrong_answer_is_a_failed_check(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "rescale_left_out")
    first, *_ = outcomes(str(fault.write(tmp_path)))
    assert first["failure"] == first["repeat"] == "wrong"
