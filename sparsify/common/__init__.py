"""Tensor names, raw bits, initial values, quantized weights, shards and ranks, for every other package."""
