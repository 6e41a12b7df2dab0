"""The entry point by which vLLM finds sparsify: not in the package, which is imported only where it is used."""

from contextlib import suppress
from typing import Any


def register() -> None:
    """Registers the weight transfer backend "sparsify"; vLLM calls it in each of its processes, maybe several times."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    with suppress(ValueError):  # it is registered
        engine = "sparsify.integrations.vllm.engine", "SparsifyWeightTransferEngine"
        WeightTransferEngineFactory.register_engine("sparsify", *engine)
        if current_platform.is_cpu():
            keep_weights_on_cpus()


def keep_weights_on_cpus() -> None:
    """Has vLLM keep weights as they are on a CPU, too, where it packs them for oneDNN, if the backend is "sparsify"."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    pack_linear, experts = utils.dispatch_cpu_unquantized_gemm, cpu_moe.CPUUnquantizedExperts
    pack_experts, apply = experts.process_weights_after_loading, experts.apply

    def is_used() -> bool:
        config = get_current_vllm_config().weight_transfer_config
        return config is not None and config.backend == "sparsify"

    def linear(layer: Any, remove_weight: bool) -> None:
        if is_used():
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack_linear(layer, remove_weight)

    def process(self: Any, layer: Any) -> None:
        self.weights_are_plain = is_used()
        if not self.weights_are_plain:
            pack_experts(self, layer)

    def packed_apply(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> None:
        if self.weights_are_plain:
            w1, w2 = (cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2))
        apply(self, output, hidden_states, w1, w2, *args, **kwargs)

    utils.dispatch_cpu_unquantized_gemm = linear
    experts.process_weights_after_loading, experts.apply = process, packed_apply
