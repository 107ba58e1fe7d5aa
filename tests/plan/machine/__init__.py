"""Clusters: files, curves, and prices by hand and by property."""
