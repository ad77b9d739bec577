"""What a row says before the card speaks: the config, the model's numbers and the compiler's."""

from __future__ import annotations

from dataclasses import dataclass

from flashtune.budget import BudgetLine
from flashtune.gpu import GpuSpec
from flashtune.plan import ProblemPlan
from flashtune.records import FURTHER_AXES, KEEP, Compiled, Config, Status
from flashtune.results import Row

_PROBLEM_COLUMNS = ("dtype", "B", "H", "H_kv", "N", "N_k", "D", "causal")
_CONFIG_COLUMNS = ("q_tile", "k_tile", "num_warps", "num_stages", *FURTHER_AXES)


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of one run: of one kernel, by name, on one GPU."""

    run_id: str
    kernel: str
    gpu: GpuSpec

    def row(
        self,
        plan: ProblemPlan,
        config: Config,
        status: Status,
        reason: str | None,
        compiled: Compiled | None = None,
    ) -> Row:
        """The row of ``config`` on the problem of ``plan``, with nothing measured; without
        ``compiled``, what the compiler says is null too."""
        budget = plan.budgets[config]
        blocks = BudgetLine(budget, KEEP, compiled, ()).blocks_per_sm(self.gpu)
        return Row(
            run_id=self.run_id,
            status=status,
            reason=reason,
            kernel=self.kernel,
            gpu=self.gpu.name,
            cc=self.gpu.cc,
            **{name: getattr(plan.problem, name) for name in _PROBLEM_COLUMNS},
            **{name: getattr(config, name) for name in _CONFIG_COLUMNS},
            shared_predicted=budget.shared,
            shared_limit=self.gpu.shared_per_block,
            shared=None if compiled is None else compiled.shared,
            regs=None if compiled is None else compiled.regs,
            spills=None if compiled is None else compiled.spills,
            blocks_per_sm=blocks,
            waves=budget.waves(blocks),
            predicted_ms=plan.predicted_ms.get(config),
            compile_s=None if compiled is None else compiled.seconds,
            code_hash=None if compiled is None else compiled.code_hash,
        )

    def of_compiled(
        self, plan: ProblemPlan, compiled: Compiled, status: Status, reason: str | None
    ) -> Row:
        """:meth:`row` of a config that went to the compiler."""
        return self.row(plan, compiled.config, status, reason, compiled)

    def refused(self, plan: ProblemPlan, compiled: Compiled) -> Row | None:
        """The row of what did not compile, or takes more shared memory than a block may have; None
        where ``compiled`` can be launched."""
        if compiled.failure is not None:
            return self.of_compiled(plan, compiled, compiled.failure, compiled.reason)
        limit = self.gpu.shared_per_block
        if compiled.shared is None or compiled.shared <= limit:
            return None
        reason = f"shared memory, required {compiled.shared:,} bytes, limit {limit:,}"
        return self.of_compiled(plan, compiled, Status.OUT_OF_RESOURCES, reason)
