"""Deltas apart from any training: the entries that it changed, their file, and operations on both."""
