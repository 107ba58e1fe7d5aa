"""All-gather by a kernel."""
