"""Masked modules: layers that hand the gradient of their frozen weights to a collector and keep none of it."""
