"""What a run needs around the core's training step.

plan, install        settle what to train, and change the model
engine               the core's step on several devices, ranks and shards
forward              the root's forward passes, and the node that all biases and norms share in each
weights, entries     base + delta in the weights; buffers that others write to
optimizer_steps      steps that have begun; optimizers made in the wrong order
state, settings      state dicts, and what they are compared by
export, summary      the way out: a delta, or a stream of versions; a report
compiled, quantized, distributed
"""
