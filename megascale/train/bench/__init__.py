"""`megascale bench step`: the training step of a recipe on this machine, and MegaScale's ladder.

A run is `megascale train` itself, on ranks that are started here (`measure.py`); nothing is timed
but what users run. A case is a recipe with its overrides on a number of ranks (`case.py`). With
`--ablate` the cases are the rungs of MegaScale's Table 3 (`ladder.py`), each with the switches of
those below it, climbed one after the other (`climb.py`). A row is written when its run has passed
the value checks (`rows.py`), so a run that is cut short leaves the rows that it had.

What it costs: a start of all ranks a run (10 to 60 s on GPUs), the steps of the recipe, and
nothing inside the step.
"""
