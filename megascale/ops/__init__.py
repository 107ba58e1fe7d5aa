"""Single-device operators of the transformer, each with a plain reference and a value test.

They know no groups and no ranks; `parallel` composes their pieces over tensor-parallel shards.
"""
