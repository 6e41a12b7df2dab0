"""Sparsified models in the training loops of others; each module imports the library that it is about."""
