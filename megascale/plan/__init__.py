"""What should happen, as pure data: schedules, layer placement, sizes, memory. No torch.

The same data is executed by `parallel/pipeline.py`, proved by `plan/check.py` and priced by the
planner, so what is predicted is what runs.
"""
