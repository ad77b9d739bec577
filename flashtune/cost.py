"""The cost model: how long one config takes, predicted from counts, and so the order to try in.

An SM is a few units that work side by side: tensor cores, the special-function unit, the fp32
lanes, shared memory and the path to L2. ``operations`` says how much of each a key step needs, and
``machine`` how fast each is. A step of a program then takes

    chain  what one warp waits for in turn: its own work on every unit, barriers, and the part of
           the next tiles' loads that the pipeline does not hide
    queue  with ``blocks`` programs on the SM, the time until the busiest unit has served them all;
           the other units' work hides behind it, but for a share (``crosstalk``)

and the time is the two joined, (chain^p + queue^p)^(1/p). One resident program is all chain, many
are all queue, which is what occupancy is for. Steps add up to programs, programs to waves; nothing
here was fitted to single configs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtune.budget import Budget
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.machine import Machine, clock_mhz, machine
from flashtune.operations import (
    BANK_BYTES,
    KeySteps,
    Operations,
    StepWork,
    dram_bytes,
    key_steps,
    operations,
    step_work,
)
from flashtune.records import Config, OutClass, Problem, Verdict
from flashtune.tensor_cores import WARP, reads_in_place

__all__ = ["Cost", "Model", "Operations", "Parts", "operations", "order", "place", "predict"]

LIKELY_SPILLS = 0.5  # a spill's probability that puts a config behind the others

# Instructions, each done by as many threads as share the work, counted in v6's code: for each score
# a multiply-add, a maximum, an exp2, a sum and half a conversion to 16 bits; for each 16-byte copy
# its addresses and its mask; for each row the shuffles and the updates of m, l and alpha, by the 4
# threads that share it; for each thread the loop itself.
_PER_SCORE, _PER_OUTPUT, _PER_COPY, _PER_ROW, _PER_THREAD = 4.5, 1.0, 8.0, 64.0, 40.0
# One loop masks every tile, and v0, which has it, also calls exp: from v1 to v4 the articles'
# instructions fell from 394 M to 264 M for 537 M scores, that is by 7.8 a score.
_PER_SCORE_ONE_LOOP = 7.8
_BARRIERS_STACKED, _BARRIERS_SIDE_BY_SIDE = 2, 9  # a step, counted in the articles' Round 0
_SUB_PARTITIONS = 4
# Of a spilled register, a step: stored and loaded once; mma.sync takes its operands from registers,
# and what does not fit is loaded again for several of its instructions (from recorded spillers).
_SPILL_ACCESSES, _SPILL_ACCESSES_MMA_V2 = 2, 4
_STAGGERED_TAIL = 0.25  # of the longest program: how late SMs end when long programs start last


class Parts(NamedTuple):
    """Where a predicted time goes, in milliseconds.

    The units' times are what each alone would be busy; they overlap. launch, start, the longest of
    the units, waiting and tail add up to the whole.
    """

    tensor: float
    special: float  # exp2
    arithmetic: float  # fp32 lanes: softmax, rescaling, addresses
    shared: float  # shared memory, spilled registers included
    l2: float
    dram: float
    launch: float
    start: float  # programs' starts and ends
    waiting: float  # latencies, barriers, loads, and units in each other's way
    tail: float  # SMs that are less than full

    @property
    def units(self) -> dict[str, float]:
        """The overlapping ones, by name."""
        return {name: getattr(self, name) for name in self._fields[:6]}


@dataclass(frozen=True)
class Cost:
    """What the model predicts for one config. Nothing in it was measured."""

    config: Config
    predicted_ms: float
    parts: Parts


def order(
    problem: Problem,
    budgets: Sequence[Budget],
    verdicts: Sequence[Verdict],
    gpu: GpuSpec,
    kernel: Kernel,
) -> list[Cost]:
    """Those of ``budgets`` that can run, the fastest predicted first; likely spillers, and what
    likely takes too much shared memory, come behind them, and the hopeless last. Ties keep the
    order in which the configs came.
    """
    model = Model(problem, gpu, kernel)
    costs = []
    for budget, verdict in zip(budgets, verdicts, strict=True):
        if verdict.out is not OutClass.CANNOT:
            cost = model.predict(budget)
            costs.append((place(budget, verdict.kept, cost), cost))
    costs.sort(key=lambda item: item[0])
    return [cost for _, cost in costs]


def place(budget: Budget, kept: bool, cost: Cost) -> tuple[bool, bool, float]:
    """What the order goes by: the smaller, the earlier."""
    spills = budget.registers.spill_probability >= LIKELY_SPILLS
    too_large = budget.order_blocks_by_shared == 0  # likely: where it is certain, it is not tried
    return not kept, spills or too_large, cost.predicted_ms


def predict(
    problem: Problem,
    budget: Budget,
    gpu: GpuSpec,
    kernel: Kernel,
    constants: Machine | None = None,
) -> Cost:
    """The predicted time of one config, and where it goes. ``constants`` replaces the card's."""
    return Model(problem, gpu, kernel, constants).predict(budget)


class _Tile(NamedTuple):
    """What configs that differ only in their stages have in common."""

    steps: KeySteps
    programs: int  # of the fullest SM
    mean_steps: float  # of an SM, masked ones counted at their cost
    extra_steps: float  # of a program: what its masked steps cost more, in steps
    blocks_by_registers: int
    in_place: bool  # wgmma or tcgen05, which read K and V where they were copied to
    busy_ms: tuple[float, float, float, float, float, float]  # each unit, in the order of Parts
    busiest_ms: float
    chain: float  # clocks a step, without waiting for loads
    queue: float  # clocks a step, for each resident program
    fill: tuple[float, float]  # clocks to copy in Q's tile, and one of K with one of V


class Model:
    """One problem on one card with one kernel: all that does not change from config to config."""

    def __init__(
        self, problem: Problem, gpu: GpuSpec, kernel: Kernel, constants: Machine | None = None
    ) -> None:
        self.problem, self.gpu, self.kernel = problem, gpu, kernel
        self.machine = m = constants or machine(gpu)
        self.clocks_a_ms = clock_mhz(gpu) * 1e3
        self.heads = problem.B * problem.H
        self.dram_ms = sum(dram_bytes(problem)) / (gpu.dram_gb_s * 1e6)
        self.falling = kernel.skips_causal_tiles and problem.causal
        self.masked_step = m.masked_step if kernel.key_loops == 2 else 0.0
        rate = gpu.tensor_flop_per_clock_per_sm(problem.dtype)
        if rate is None:  # a card without a row: its architecture's rate, half of it for tf32
            rate = m.tensor_flop // (2 if problem.dtype == "fp32" else 1)
        self.tensor_rate = rate
        self.tiles: dict[tuple[int, int, int, int], _Tile] = {}

    def predict(self, budget: Budget) -> Cost:
        config, m, a_ms = budget.config, self.machine, self.clocks_a_ms
        key = (config.q_tile, config.k_tile, config.num_warps, budget.register_cap)
        tile = self.tiles.get(key)
        if tile is None:
            tile = self.tiles[key] = self._tile(budget)
        # A tile's loads start num_stages - 1 steps early; operands that are read in place free
        # their buffer, and so start the loads that follow, one step later.
        ahead = config.num_stages - (2 if tile.in_place else 1)
        chain = tile.chain
        chain = max(chain, m.load_cycles / ahead) if ahead > 0 else chain + m.load_cycles
        blocks = _resident(budget, tile.blocks_by_registers)
        full = self._step(chain, blocks * tile.queue)
        if self.falling:
            clocks = self._falling(tile, chain, blocks, full)
            starts = max(1.0, tile.programs / blocks)
        else:
            clocks = self._equal(tile, chain, blocks, full)
            starts = -(-tile.programs // blocks)

        busiest, launch = tile.busiest_ms, m.launch_us / 1e3
        start = starts * self._start(tile, config.num_stages, blocks) / a_ms
        run = max(clocks / a_ms, busiest)
        evenly = tile.mean_steps * full / blocks / a_ms  # if every SM stayed full to the end
        tail = min(run - busiest, max(0.0, run - evenly))
        parts = Parts(*tile.busy_ms, launch, start, run - busiest - tail, tail)
        return Cost(config, launch + start + run, parts)

    def _start(self, tile: _Tile, stages: int, blocks: int) -> float:
        """Clocks before a program's first multiply and after its last: a fixed part, and the bytes
        that fill the pipelines of all the SM's programs."""
        q_tile, pair = tile.fill
        pairs = max(1, min(stages - 1, tile.steps.longest_first[0]))
        fill = min(blocks, tile.programs) * (q_tile + pairs * pair)
        return self.machine.start_cycles + self.machine.load_cycles + fill

    def _step(self, chain: float, queue: float) -> float:
        p = self.machine.sharpness
        joined: float = (chain**p + queue**p) ** (1 / p)
        return joined

    def _tile(self, budget: Budget) -> _Tile:
        m, warps, problem = self.machine, budget.working.num_warps, self.problem
        in_place, stacked = reads_in_place(budget.instructions), budget.warps_stacked
        steps = key_steps(problem, budget.config, self.kernel)
        work = step_work(problem, budget.working, budget.instructions)
        wanted = budget.registers.wanted
        spilled = max(0.0, wanted - budget.register_cap)

        share = m.tensor_share if in_place else min(m.tensor_share, m.mma_v2_share)
        tensor = work.tensor / (self.tensor_rate * share)
        special = (work.scores + work.rows) / m.special
        arithmetic = self._instructions(work, warps) / m.fp32_lanes
        # Every access to a spilled register is a wavefront for every warp.
        accesses = _SPILL_ACCESSES if in_place else _SPILL_ACCESSES_MMA_V2
        shared = (work.wavefronts + accesses * spilled * warps) * BANK_BYTES / m.shared_bytes
        shared += work.exchanges * WARP / m.lsu_lanes
        l2 = work.l2_bytes / m.l2_bytes

        units = (tensor, special, arithmetic, shared, l2)
        busiest, busy = max(units), tensor + special + arithmetic + shared
        own = busy - tensor  # multiplies run on while their warp does what does not need them
        barriers = _BARRIERS_STACKED if stacked else _BARRIERS_SIDE_BY_SIDE
        slow = self.masked_step * steps.masked  # in steps of one head
        mean = (steps.total + slow) * self.heads / self.gpu.sms
        ms = mean / self.clocks_a_ms  # of one clock in every step
        busy_ms = (tensor * ms, special * ms, arithmetic * ms, shared * ms, l2 * ms, self.dram_ms)
        q_bytes = budget.config.q_tile * problem.D * problem.element_bytes
        return _Tile(
            steps=steps,
            programs=-(-self.heads * steps.programs // self.gpu.sms),
            mean_steps=mean,
            extra_steps=slow / steps.programs,
            blocks_by_registers=budget.blocks_by_predicted_registers(self.gpu),
            in_place=in_place,
            busy_ms=busy_ms,
            busiest_ms=max(busy_ms),
            chain=own * _quarters(warps, m.lockstep) + barriers * warps * m.barrier_cycles,
            queue=busiest + m.crosstalk * max(0.0, busy - busiest),
            fill=(q_bytes / m.l2_bytes, l2),
        )

    def _instructions(self, work: StepWork, warps: int) -> float:
        """A step's instructions by thread, without the multiplies and their operands' loads."""
        per_score = _PER_SCORE + (_PER_SCORE_ONE_LOOP if self.kernel.key_loops == 1 else 0.0)
        copies = work.copies if self.kernel.loads == "pointer" else 0.0  # TMA works them out itself
        return (
            work.scores * per_score
            + work.outputs * _PER_OUTPUT
            + work.rows * _PER_ROW
            + copies * _PER_COPY
            + warps * WARP * _PER_THREAD
        )

    def _equal(self, tile: _Tile, chain: float, blocks: int, full: float) -> float:
        """Clocks when all programs are alike: whole waves, then one with fewer on each SM."""
        length = tile.steps.longest_first[0] + tile.extra_steps
        waves, rest = divmod(tile.programs, blocks)
        last = self._step(chain, rest * tile.queue) if rest else 0.0
        return length * (waves * full + last)

    def _falling(self, tile: _Tile, chain: float, blocks: int, full: float) -> float:
        """Clocks when programs differ, as they do where causal tiles are skipped.

        With the longest of every head first: if all fit at once, the fullest SM's programs end one
        by one, and those that are left speed up. If not, the short ones fill the gaps, and the time
        is that of the work dealt out evenly, or of the longest.
        """
        longest, extra = tile.steps.longest_first, tile.extra_steps
        if tile.programs > blocks:
            clocks = full * max(tile.mean_steps / blocks, longest[0] + extra)
        else:
            sms, clocks, after = self.gpu.sms, 0.0, 0.0
            for together in range(tile.programs, 0, -1):  # the last one left, backwards in time
                here = longest[(together - 1) * sms // self.heads] + extra
                clocks += (here - after) * self._step(chain, together * tile.queue)
                after = here
        if self.kernel.heads_first:
            return clocks
        return clocks + _STAGGERED_TAIL * longest[0] * full


def _resident(budget: Budget, by_registers: int) -> int:
    """Blocks an SM, by the estimated registers; at least 1."""
    blocks = min(by_registers, budget.blocks_by_warps, budget.blocks_by_blocks)
    if budget.order_blocks_by_shared is not None:  # else nobody knows: judge by the rest
        blocks = min(blocks, budget.order_blocks_by_shared)
    return max(1, blocks)


def _quarters(warps: int, lockstep: float) -> float:
    """How long a warp's own share of a block's work takes, against the work on a whole SM.

    Four sub-partitions have a quarter of each unit. A lone warp has one quarter to itself; of 8
    warps, two share each, and barriers keep them from ever being quite out of step.
    """
    return _SUB_PARTITIONS / warps * (1 + lockstep * max(0.0, warps / _SUB_PARTITIONS - 1))
