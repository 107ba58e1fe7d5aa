"""The kinds of input that a preparation reads, a module each, and what they have in common."""
