"""What there is to run on: devices, nodes, network, as files; and the price of an operation."""
