"""What did happen: recorder, clocks, line files, metrics (MegaScale 5.1). No torch."""
