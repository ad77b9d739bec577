"""What a reader must know of the conditions under which something was measured, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from flashtune.results import RaceVerdict


def quiet_card(others: tuple[int, ...] | None) -> Iterable[str]:
    """What to say when the card is not ours alone."""
    if others:
        count = "another process uses" if len(others) == 1 else f"{len(others)} others use"
        yield (
            f"{count} this GPU ({', '.join(map(str, others))}): times may vary. Stop them, and run"
            " again with --fresh."
        )


def doubts(verdict: RaceVerdict) -> Iterable[str]:
    """What keeps a verdict from being the whole truth, and what to do about it."""
    far = [tie for tie in verdict.ties if not tie.equal]
    if far:
        most = max(tie.at_most for tie in far)
        yield (
            f"{verdict.problem}: after {verdict.rounds} rounds {len(far)} configs can be told from"
            f" {verdict.leader} no better than within {most:.1%}. The card is too noisy: stop what"
            " else runs on it and on this machine, or fix its clocks, and run again with --fresh."
        )
    held = {str(c.throttle) for c in verdict.conditions if c.held}
    if held:
        yield (
            f"{verdict.problem}: the clock was held down while it was raced"
            f" ({', '.join(sorted(held))}). Its order and its times are those of the clock that"
            " the card then keeps."
        )
