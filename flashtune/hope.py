"""Which configs can still win, from the model's order and how wrong it was so far.

The cost model predicts every config before anything compiles. Once some are measured, the scatter
of measured over predicted time says how far the model can be off on this card and shape; a config
that would have to beat its prediction by more than that is not worth compiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev

from flashtune.records import Config

FEWEST = 24  # configs to be measured before anything is given up
GIVEN_UP = "given up: "  # how the reason of such a row begins
SIGMAS = 3.0
"""Standard deviations of the model's own error on this shape. DESIGN.md has the evidence."""


class Hope:
    """One problem's race against the model."""

    def __init__(self, predicted_ms: Mapping[Config, float]) -> None:
        self._predicted = predicted_ms
        self._errors: list[float] = []  # log of measured over predicted
        self._best_ms = math.inf

    def saw(self, config: Config, ms: float) -> None:
        """``config`` took ``ms``."""
        self._errors.append(math.log(ms / self._predicted[config]))
        self._best_ms = min(self._best_ms, ms)

    def left(self, config: Config) -> bool:
        """Whether ``config`` may still be the fastest."""
        return self.shortfall(config) is None

    def shortfall(self, config: Config) -> str | None:
        """Why ``config`` is not worth compiling any more; None where it still may be."""
        if len(self._errors) < FEWEST:
            return None
        lucky = fmean(self._errors) - SIGMAS * stdev(self._errors)
        at_best = self._predicted[config] * math.exp(lucky)
        if at_best <= self._best_ms:
            return None
        return (
            f"{GIVEN_UP}predicted {self._predicted[config]:.4g} ms; measured times of"
            f" {len(self._errors)} configs were at least {math.exp(lucky):.2f} times predicted"
            f" ({SIGMAS:g} standard deviations), so it takes {at_best:.4g} ms or more, and the best"
            f" took {self._best_ms:.4g}"
        )
