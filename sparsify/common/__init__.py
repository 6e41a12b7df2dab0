"""Tensor names, raw bits, initial values, quantized weights, shards and ranks: what every other package may import."""
