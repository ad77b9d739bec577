"""Which configs can still win, from the model's order and how wrong it was so far.

The cost model predicts every config before anything compiles. Once some are measured, the scatter
of measured over predicted time says how far the model can be off on this card and shape; a config
that would have to beat its prediction by more than that is not worth compiling. Only the scatter on
the fast side counts: that some configs are far slower than predicted says little for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, median

from flashtune.records import Config

FEWEST = 24  # configs to be measured before anything is given up
GIVEN_UP = "given up: "  # how the reason of such a row begins
DEVIATIONS = 4.5
"""From the model's median error on this shape, of what was faster than that. DESIGN.md has the
evidence."""


class Hope:
    """One problem's race against the model."""

    def __init__(self, predicted_ms: Mapping[Config, float]) -> None:
        self._predicted = predicted_ms
        self._errors: list[float] = []  # log of measured over predicted
        self._best_ms = math.inf
        self._luck = 0.0  # the least that measured over predicted can be

    def saw(self, config: Config, ms: float) -> None:
        """``config`` took ``ms``."""
        self._errors.append(math.log(ms / self._predicted[config]))
        self._best_ms = min(self._best_ms, ms)
        if len(self._errors) >= FEWEST:
            middle = median(self._errors)
            fast = [(error - middle) ** 2 for error in self._errors if error < middle]
            self._luck = math.exp(middle - DEVIATIONS * math.sqrt(fmean(fast or [0.0])))

    def left(self, config: Config) -> bool:
        """Whether ``config`` may still be the fastest."""
        return self._predicted[config] * self._luck <= self._best_ms

    def shortfall(self, config: Config) -> str | None:
        """Why ``config`` is not worth compiling any more; None where it still may be."""
        if self.left(config):
            return None
        predicted = self._predicted[config]
        return (
            f"{GIVEN_UP}predicted {predicted:.4g} ms; as far as the model was off on"
            f" {len(self._errors)} configs ({DEVIATIONS:g} deviations of the fast ones) it takes"
            f" {self._luck:.2f} times that at least, {predicted * self._luck:.4g} ms, and the best"
            f" took {self._best_ms:.4g}"
        )
