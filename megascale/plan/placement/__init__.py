"""Which node gets which ranks, from the network's shape (MegaScale 3.6: data-intensive nodes are
scheduled under the same ToR switch)."""
