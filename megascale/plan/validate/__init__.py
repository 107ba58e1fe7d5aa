"""Predictions beside what was measured: rows printed in papers, rows of a CSV, and own runs.

Nothing here makes a prediction of its own: every row becomes a `Case` that `price` and `estimate`
see like any other.
"""
