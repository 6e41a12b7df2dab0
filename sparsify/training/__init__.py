"""The engine of a sparsified model: from the first node of a backward pass to the weights after the optimizer step."""
