"""A step of training, simulated: the trainer's own action lists at a cluster's prices.

program.py   a step as lists of numbers      engine.py    runs them in the order of time
lowering.py  from actions to such lists      buckets.py   data-parallel communication in them
step.py      all of it                       timeline.py  what comes out
chrome.py    the timeline for Perfetto       report.py    for a person, and as JSON
start.py     `megascale simulate`
"""

from megascale.plan.simulate.step import simulate, step_time
from megascale.plan.simulate.timeline import SimulatedSpan, StageParts, Timeline

__all__ = ["SimulatedSpan", "StageParts", "Timeline", "simulate", "step_time"]
