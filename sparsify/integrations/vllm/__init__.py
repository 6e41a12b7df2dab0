"""vLLM serves a model in training, and deltas by name: engine.py is in its workers, client.py talks to its server."""

from sparsify.integrations.vllm.client import VLLMPublisher, VLLMServer, VLLMTasks

__all__ = ["VLLMPublisher", "VLLMServer", "VLLMTasks"]
