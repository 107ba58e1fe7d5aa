"""Who has the machines (docs/add-a-backend.md): a file each, one contract suite for all."""
