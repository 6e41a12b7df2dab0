"""The entry point by which vLLM finds sparsify; the backend is imported only where it is used.

On a CPU vLLM packs weights for its kernels. Where the backend is "sparsify", workers on CPUs keep them as they are on a
GPU, by the extension of their class that vLLM's settings name. On a GPU nothing of vLLM is changed.
"""

from contextlib import suppress
from functools import cache
from typing import Any

BACKEND = "sparsify"


def register() -> None:
    """Registers the weight transfer backend; vLLM calls it in each of its processes, maybe several times."""
    with suppress(ImportError, ValueError):  # another version, which does not know the backend; or it is registered
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
        from vllm.platforms import current_platform

        engine = "sparsify.integrations.vllm.engine", "SparsifyWeightTransferEngine"
        WeightTransferEngineFactory.register_engine(BACKEND, *engine)
        if current_platform.is_cpu():
            _extend_workers(type(current_platform))


def _extend_workers(platform: Any) -> None:
    update = platform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        update(config)
        if getattr(config.weight_transfer_config, "backend", None) == BACKEND:
            parallel = config.parallel_config
            parallel.worker_extension_cls = parallel.worker_extension_cls or f"{__name__}.Plain"

    platform.check_and_update_config = staticmethod(check_and_update_config)


@cache
def __getattr__(name: str) -> Any:
    """``Plain``, the extension, which vLLM asks for in a worker, before it loads a model."""
    if name != "Plain":
        raise AttributeError(name)
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    apply = experts.apply

    def keep_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def pack_and_apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
        w1, w2 = (cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2))
        apply(self, output, hidden_states, w1, w2, *args, **kwargs)

    utils.dispatch_cpu_unquantized_gemm = keep_linear
    experts.process_weights_after_loading = lambda self, layer: None
    experts.apply = pack_and_apply
    return type("Plain", (), {})
