"""Reads the tensors of a base from a model, or from safetensors files in the layout that transformers stores."""
