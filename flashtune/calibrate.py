"""Fitting the cost model's calibrated constants to recorded times.

The shipped constants came from here, and ``audit model`` fits them again to some shapes to score
them on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING

from flashtune.budget import Budget
from flashtune.cost import Model
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.machine import CALIBRATED, Machine, machine
from flashtune.records import Problem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float64]

# Where the fit starts: round numbers, so that nothing is known of the shapes that are held out.
_START = {
    "launch_us": 5.0, "start_cycles": 2000.0, "load_cycles": 800.0, "barrier_cycles": 20.0,
    "lockstep": 0.5, "masked_step": 0.5, "crosstalk": 0.3, "sharpness": 2.5,
}  # fmt: skip
_FASTEST = 4.0  # times over this multiple of the best are not fitted: nobody asks for them
_HOPELESS_WEIGHT = 0.3
_FAVOUR = 1.5  # a config twice as slow as the best weighs 2^-1.5
_OUTLIER = 0.1  # of log time: residuals beyond it count by their size and not by its square
_ITERATIONS = 15
_STEP = 0.02  # of each constant, for the slopes


@dataclass(frozen=True)
class Timed:
    """One shape's recorded times, with the budgets of the configs that were timed."""

    problem: Problem
    gpu: GpuSpec
    kernel: Kernel
    budgets: tuple[Budget, ...]
    kept: tuple[bool, ...]  # by the budget's rules
    ms: tuple[float, ...]


def calibrate(shapes: Sequence[Timed]) -> Machine:
    """The constants that fit ``shapes``, which are of one GPU, best.

    Least squares of log time by Levenberg and Marquardt's method, on the constants' logarithms, so
    that they stay positive. Fast configs weigh most, outliers and hopeless ones little.
    """
    import numpy as np

    base = machine(shapes[0].gpu)
    residuals = _residuals(shapes, base)
    x = np.log(np.array([_START[name] for name in CALIBRATED]))
    here, damping = residuals(x), 1e-2
    for _ in range(_ITERATIONS):
        slopes = np.stack(
            [(residuals(x + step) - here) / _STEP for step in np.eye(len(x)) * _STEP], axis=1
        )
        soft = 1 / np.sqrt(1 + (here / _OUTLIER) ** 2)
        normal = slopes.T @ (slopes * soft[:, None])
        gradient = slopes.T @ (here * soft)
        for _ in range(6):
            lifted = normal + damping * np.diag(np.diag(normal) + 1e-9)
            there = x - np.clip(np.linalg.solve(lifted, gradient), -0.7, 0.7)
            moved = residuals(there)
            if _loss(moved) < _loss(here):
                break
            damping *= 5
        else:
            break
        gained = _loss(here) - _loss(moved)
        x, here, damping = there, moved, damping / 3
        if gained < 1e-4 * _loss(here):
            break
    return _constants(base, x)


def _residuals(shapes: Sequence[Timed], base: Machine) -> Callable[[Vector], Vector]:
    import numpy as np

    chosen: list[tuple[Timed, list[tuple[Budget, float, float]]]] = []
    for shape in shapes:
        best = min(shape.ms)
        points = [
            (budget, log(ms), (best / ms) ** _FAVOUR * (1.0 if kept else _HOPELESS_WEIGHT))
            for budget, kept, ms in zip(shape.budgets, shape.kept, shape.ms, strict=True)
            if ms <= _FASTEST * best
        ]
        chosen.append((shape, points))

    def residuals(x: Vector) -> Vector:
        constants = _constants(base, x)
        values = []
        for shape, points in chosen:
            model = Model(shape.problem, shape.gpu, shape.kernel, constants)
            for budget, log_ms, weight in points:
                values.append(weight * (log(model.predict(budget).predicted_ms) - log_ms))
        return np.array(values)

    return residuals


def _loss(residuals: Vector) -> float:
    import numpy as np

    scaled = (residuals / _OUTLIER) ** 2
    return float(np.sum(np.sqrt(1 + scaled) - 1))


def _constants(base: Machine, x: Vector) -> Machine:
    values = {name: 2.718281828459045 ** float(v) for name, v in zip(CALIBRATED, x, strict=True)}
    return replace(base, **values)
