"""Which layout: all that are legal, in columns; which fit; which is fastest, and why."""
