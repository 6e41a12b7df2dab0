"""``sparsify demo``: fine-tune a real model on real text, save the delta, load it onto a fresh base, compare.

docstrings   the standard library's own docstrings, with what each documents -> training and held-out examples
classifier   examples -> tokens -> mean-pooled encoder -> linear head -> logits
training     the frozen-feature baseline, the training loop, the logits of a whole set
flow         the demo itself, step by step; tells a reporter what happens
report       the reporter that draws progress bar and table
command      the options of the command line
"""
