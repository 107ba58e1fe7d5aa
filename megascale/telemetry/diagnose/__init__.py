"""Detectors and readers: pure functions from what was recorded to findings (MegaScale 4.3, 5).

No clock, no file, no network: time is in what they are given. The driver asks the detectors while
a job runs, and the command line and the dashboard ask the same functions of a run that has ended.
"""
