"""What is done with a trained model: today generation, on one device, with a key-value cache."""
