"""``sparsify demo``: fine-tune a real model on real text, save the delta, load it onto a fresh base, compare.

docstrings   the standard library's docstrings, labelled with what each documents -> training and held-out examples
classifier   examples -> tokens -> mean-pooled encoder -> linear head -> logits
training     the frozen-feature baseline, the training loop, the logits of a whole set
command      options, the demo step by step, and its display: progress bar and table
"""
