"""What a large cluster does to a step beside the step's own work: seeded models with intervals.

Each module is one model and knows nothing of the others; `effects.py` is what they add up to, and
`compose.py` adds them up for a case on a cluster. Everything here is simulated, nothing measured.
"""
