"""The transformer on one device: maths, its sharding as a table, names shared with Hugging Face.

It knows no ranks. `parallel` finds modules by their paths (`sharding`), replaces their `op`s and
shards their parameters.
"""
