"""Selects the entries that a step unmasks, from gradients that arrive one tensor at a time."""
