"""What a device has to do for a layer, a head or an update: operations with sizes, no times."""
