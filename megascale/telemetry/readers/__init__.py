"""Readers: a question about a run, asked of its store (MegaScale 5, 6.3).

Each file takes what it needs from a `Run`, hands it to a pure function of `diagnose/`, and gives an
`Answer`: JSON for the dashboard and `megascale diagnose RUN NAME --json`, sentences for a person.

To add one: a file with an `ask(run, window)`, and a row here. A reader's module is imported when it
is asked.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megascale.telemetry.readers.answer import Answer, Reader, Window

if TYPE_CHECKING:
    from megascale.telemetry.store.run import Run

QUESTIONS: Mapping[str, str] = {
    "summary": "What runs here, how fast is it, and what is wrong?",
    "heat_map": "Which rank, host or group stands out in which phase?",
    "stragglers": "Which ranks compute slower than their peers?",
    "what_if": "How long would a step take without the slow ranks?",
    "decomposition": "Where does a step's time go, and what is the MFU?",
    "drift": "Which phase grew in the course of the run, since when, by whom?",
    "late": "Which ranks launch collectives late, so that others wait?",
    "hang": "Who holds up a run that stands still?",
    "bubbles": "How long do pipeline stages idle, against what the schedule predicts?",
    "communication": "What do collectives and transfers achieve, against the link?",
    "network": "Did ports reach the link's speed, were they congested?",
    "loss": "Did the loss or the gradient norm jump, were steps skipped?",
    "restarts": "What did restarts cost, and did the loss go on as it was?",
    "memory": "How full is memory, and did allocations fail?",
    "compare": "Which of several runs is faster, and which hosts make the difference?",
}
"""The readers' names and what each answers, in the order in which they are listed."""


def _reader(name: str, question: str) -> Reader:
    def ask(run: Run, window: Window) -> Answer:
        module = importlib.import_module(f"megascale.telemetry.readers.{name}")
        answer: Answer = module.ask(run, window)
        return answer

    return Reader(name, question, ask)


READERS: Mapping[str, Reader] = {
    name: _reader(name, question) for name, question in QUESTIONS.items()
}
