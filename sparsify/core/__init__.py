"""The method: importance, schedule, top-k, masked layers, entries, and the training step. It imports torch alone.

layers, taps   masked modules: their nodes hand each weight's gradient over     (module, tensor, gradients)
step           collects the gradients of a backward pass, and commits its winners
policy         how many entries a step unmasks, and which ones                  (schedule, importance, topk)
entries        the unmasked ones, in order of unmasking
optimizer      counts optimizer steps
install        makes a plain model train so, and plain again
"""
