"""Faults on purpose: the schedule, the judgement, the properties, and real runs."""
