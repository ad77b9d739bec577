"""The order in which to try configs. A stated rule, not yet a model: it predicts no times."""

from __future__ import annotations

from flashtune.budget import MMA_ROWS, Budget, blocks_by_registers
from flashtune.gpu import GpuSpec
from flashtune.records import OutClass, Verdict

_STAGES_BY_WORTH = (3, 2, 4, 5, 1)
_OTHER_REGISTERS = 64  # a thread: addresses, m, l, operands; 60 to 80 in the compiled ladder


def order(budgets: list[Budget], verdicts: list[Verdict], gpu: GpuSpec) -> list[Budget]:
    """Those of ``budgets`` that can run, the most promising first.

    The rule, in this order: what the budget calls hopeless goes last. Then configs that repeat no
    work; that keep S and O within half the register cap, so that they hardly spill; that leave
    room for a second block on the SM, whose multiplies run while the first does its softmax; that
    have one warp for every 16 query rows, or for 32; the pipeline depths 3 and 2, then 4 and 5,
    then 1; and the larger tile, which reads less and loops less. It is what the articles' sweeps
    and the recorded H200 landscape have in common.
    """
    ranked = [
        (_key(budget, verdict, gpu), index, budget)
        for index, (budget, verdict) in enumerate(zip(budgets, verdicts, strict=True))
        if verdict.out is not OutClass.CANNOT
    ]
    return [budget for _, _, budget in sorted(ranked, key=lambda item: item[:2])]


def _key(budget: Budget, verdict: Verdict, gpu: GpuSpec) -> tuple[float, ...]:
    config = budget.config
    regs = min(budget.register_cap, int(budget.accumulators) + _OTHER_REGISTERS)
    blocks = budget.blocks_per_sm(blocks_by_registers(gpu, config.num_warps, regs))
    rows_a_warp = config.q_tile / config.num_warps
    stages = config.num_stages
    depth = _STAGES_BY_WORTH.index(stages) if stages in _STAGES_BY_WORTH else stages
    return (
        not verdict.kept,
        budget.repeats,
        budget.accumulators > budget.register_cap / 2,
        blocks is not None and blocks < 2,
        rows_a_warp not in (MMA_ROWS, 2 * MMA_ROWS),
        depth // 2,
        -(config.q_tile * config.k_tile),
        depth,
    )
