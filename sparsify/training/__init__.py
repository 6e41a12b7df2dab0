"""The engine of a sparsified model. ``plan.py`` settles what to train, ``install.py`` changes the model. Each step:

    forward         the root's hooks (``state.py``) bring the weights in step with the flat delta (``weights.py``); each
                    masked module announces the use of its weight to the engine (``engine.py``)
    anchors         the use's autograd node hangs on the tensor's anchor, and that on the flat delta's, so that autograd
                    runs them after the last gradient (``anchors.py``; under torch.compile ``compiled.py``)
    backward        each node hands the weight's gradient to the collector, which adds the unmasked entries' part to the
                    flat gradient and offers the rest to the step's selector (``backward.py``, and ``selection/``)
    commit          the root anchor's node runs last: the winners join the index buffers, and autograd gets the flat
                    gradient as that of ``sparse_values`` (``BackwardCollector.commit``)
    optimizer step  any optimizer moves ``sparse_values`` (``flat_delta.py``); a hook counts the step
                    (``optimizer_hook.py``)
    weights         base + delta is written into the weights at the unmasked entries (``EffectiveWeights.write``)

The rest: state dicts and their settings (``state.py``, ``settings.py``), several ranks (``rank_checks.py``,
``sharding.py``), quantized bases (``quantized.py``), tensors that the base lacks (``new_parameters.py``), and the ways
out of the model (``export.py``, ``verification.py``, ``summary.py``).
"""
