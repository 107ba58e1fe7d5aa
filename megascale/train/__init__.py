"""Composes everything: a run from a `RunConfig`, its loop, its checkpoints, its conversions."""
