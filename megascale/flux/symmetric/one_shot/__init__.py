"""Sums over ranks in one hop."""
