"""`megascale calibrate`: measures the devices and links at hand, writes a cluster file of them."""
