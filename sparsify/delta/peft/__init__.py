"""PEFT's adapters: its sparse ones, SHiRA and Supertuning, read as deltas; others recorded, and built again."""
