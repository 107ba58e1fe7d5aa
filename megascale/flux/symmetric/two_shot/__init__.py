"""All-reduce in two hops: reduce-scatter, then all-gather, in one kernel."""
