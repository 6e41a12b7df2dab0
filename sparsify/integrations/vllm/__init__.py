"""vLLM serves a model in training, and many deltas on one base.

engine.py is in vLLM's workers, which find it by the entry point in ``sparsify_vllm.py``; client.py sends to its server.
"""
