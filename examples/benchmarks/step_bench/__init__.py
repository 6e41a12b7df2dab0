"""``sparsify bench``: training steps of several methods side by side, and their ratios.

command  options, checked before anything starts      run     a process per method and round
worker   one method in one process                    report  table and plot
methods  what each method trains                      shapes, tokens  the models and their batches
"""
