"""``sparsify demo``: fine-tune a real model on real text, save the delta, load it onto a fresh base, compare."""
