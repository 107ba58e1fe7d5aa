"""A plan for readers: text for a terminal, JSON for programs, one HTML file with plots."""
