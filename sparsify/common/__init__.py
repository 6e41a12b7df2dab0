"""Tensor names, raw bits, quantized weights, shards and ranks, for every other package."""
