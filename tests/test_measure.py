"""When a track on the card says that it is steady: a GPU and a clock that do as they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flashtune import measure
from flashtune.gpu_process import Lost
from flashtune.measure import NOTICE_S, SETTLE_S, GpuTrack
from flashtune.records import Config, Problem, Status
from flashtune.results import Checked, Conditions
from flashtune.space import parse_config

PROBLEM = Problem(4, 8, 8, 1024, 1024, 64, False, "bf16")
CONFIGS = [parse_config(text) for text in ("64x64x4x3", "128x64x8x4")]
COOL, HELD = "none", "power cap"
ROUND_S = 0.125  # exact in binary, so that no time here is a hair beside another


class Card:
    """Its rounds take ``round_s``, and it says what ``says`` has for them, by seconds."""

    def __init__(self, says: Any, round_s: float = ROUND_S) -> None:
        self.says, self.round_s, self.now, self.fails = says, round_s, 100.0, 0

    def monotonic(self) -> float:
        return self.now

    def round(
        self, problem: Problem, configs: Sequence[Config], launches: int, turn: int
    ) -> tuple[dict[Config, tuple[float, ...]], Conditions]:
        if self.fails:
            self.fails -= 1
            self.now += 8  # another process starts
            raise Lost(Checked(Status.CRASHED, "died", None))
        self.now += self.round_s
        throttle = self.says(self.now - 100)
        return dict.fromkeys(configs, (1.0,) * launches), Conditions(1980, 400.0, 50, throttle)


def track_on(card: Any, monkeypatch: pytest.MonkeyPatch) -> GpuTrack:
    """At the start of a final, with the card's own clock."""
    monkeypatch.setattr(measure, "time", card)
    track = GpuTrack(card, PROBLEM)
    track.restart()
    return track


def said(card: Card, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[float, object]]:
    """What ``steady`` says after each round, with the time at which that round began."""
    track = track_on(card, monkeypatch)
    answers = []
    while card.now < 100 + seconds:
        began = card.now - 100
        track.round(CONFIGS, 8)
        answers.append((began, track.steady()))
    assert len(track.conditions) == len(answers)
    return answers


@pytest.mark.parametrize("throttle", [None, COOL, "idle", "application clocks, idle"])
def test_what_no_card_holds_down_is_steady_when_it_had_time_to_say_so(
    throttle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for began, steady in said(Card(lambda now: throttle), monkeypatch, 2):
        assert steady is (True if began >= ROUND_S + NOTICE_S else None)


@pytest.mark.parametrize("noticed", [0.25, 0.375, 0.625, 2.0])
def test_a_card_that_is_held_down_is_steady_a_while_after_it_says_so(
    noticed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late; and whether it goes on saying so or not."""
    for until in (9.0, noticed + ROUND_S):
        card = Card(lambda now, until=until: HELD if noticed <= now < until else COOL)
        answers = dict(said(card, monkeypatch, 4))
        first_false = min(began for began, steady in answers.items() if steady is False)
        assert first_false == noticed - ROUND_S  # when that round began
        for began, steady in answers.items():
            if began >= noticed:
                assert steady is (began >= noticed + SETTLE_S)
            elif began < first_false:
                assert steady is (True if began >= ROUND_S + NOTICE_S else None)


def test_a_process_that_starts_meanwhile_is_no_time_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first round, and where a later one falls back to calls of each config."""
    slow = Card(lambda now: COOL, round_s=8.0)
    assert said(slow, monkeypatch, 8) == [(0.0, None)]
    card = Card(lambda now: COOL)
    track = track_on(card, monkeypatch)
    for _ in range(7):
        track.round(CONFIGS, 8)
    assert track.steady() is True
    card.fails = 1
    track.round(CONFIGS, 8)
    assert track.steady() is None and len(track.unexplained) == 1
    for _ in range(5):
        track.round(CONFIGS, 8)
    assert track.steady() is True


def test_another_final_asks_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(lambda now: HELD)
    track = track_on(card, monkeypatch)
    for _ in range(2):
        track.restart()
        track.round(CONFIGS, 8)
        assert track.steady() is False
        while track.steady() is False:
            track.round(CONFIGS, 8)
        assert track.steady() is True
