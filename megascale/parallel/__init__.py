"""Makes the plan real: groups, tensor/sequence parallelism, sharded data parallelism, pipeline."""
