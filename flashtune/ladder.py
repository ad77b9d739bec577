"""The ladder: the articles' steps from a first kernel to one that keeps up with SDPA, and beyond.

A step is a body and a way to choose its config. Several steps change only the config: they share
the body of another step, and no body is written twice. Which configs a step gets on a given card is
choose.py's answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashtune.records import Config


@dataclass(frozen=True)
class Fixed:
    """One config, written into the step; ``fallback`` where it cannot run."""

    config: Config
    fallback: Config | None = None


@dataclass(frozen=True)
class Tuned:
    """The config is chosen for each shape among those that a sweep found best on the card."""

    swept: str  # the kernel of that sweep, a name in kernels.KERNELS


@dataclass(frozen=True)
class Step:
    """One rung: what it changes, the kernel that it runs, and how that gets its config."""

    name: str
    summary: str  # what it changes over the step before
    body: str  # a name in kernels.KERNELS
    choice: Fixed | Tuned


_STEPS = (
    Step(
        "v0_baseline",
        "the first kernel: tiles of 16 x 16, every key tile visited and masked, exp",
        "v0_baseline",
        Fixed(Config(16, 16, 4, 3)),
    ),
    Step(
        "v1_tiles",
        "larger tiles, so that each warp owns whole rows",
        "v0_baseline",
        # Wide rows take more shared memory: fp32 at D=128 needs 107,520 bytes with three stages,
        # more than an Ada block may have, and 74,752 with two.
        Fixed(Config(64, 32, 4, 3), fallback=Config(64, 32, 4, 2)),
    ),
    Step(
        "v2_autotune",
        "the config chosen for each shape among the best of a sweep",
        "v0_baseline",
        Tuned("v0_baseline"),
    ),
    Step(
        "v3_causal_skip",
        "causal tiles above the diagonal are never visited, only those on it are masked",
        "v3_causal_skip",
        Tuned("v0_baseline"),  # v2's list still: this step changes the body alone
    ),
    Step(
        "v4_exp2",
        "exp2, with the softmax scale and log2(e) in one multiply-add",
        "v4_exp2",
        Tuned("v0_baseline"),
    ),
    Step(
        "v5_final",
        "tuned again: the config chosen among the best of a sweep of this body",
        "v4_exp2",
        Tuned("v4_exp2"),
    ),
    Step(
        "v6_heads_first",
        "heads on grid axis 0 and query tiles reversed: the longest programs start first",
        "v6_heads_first",
        Tuned("v6_heads_first"),
    ),
    Step(
        "v7_descriptor",
        "Q, K and V through tensor descriptors: TMA copies whole tiles",
        "v7_descriptor",
        Tuned("v7_descriptor"),
    ),
    Step(
        "v8_warp_specialised",
        "one loop, and Triton splits loading from computing: warps with jobs of their own",
        "v8_warp_specialised",
        Tuned("v8_warp_specialised"),
    ),
    Step(
        "v9_ping_pong",
        "the same split by hand, and one warpgroup's softmax beside the other's multiplies",
        "v9_ping_pong",
        Tuned("v9_ping_pong"),
    ),
    Step(
        "v10_persistent",
        "programs stay for one query tile after another: loading runs on beside the last stores",
        "v10_persistent",
        Tuned("v10_persistent"),
    ),
)

LADDER = {step.name: step for step in _STEPS}
"""Every step by its name, in order."""
