"""The weight transfer backend "sparsify" of vLLM: updates of a stream, and deltas by name, in a worker's own memory.

    vllm serve MODEL --weight-transfer-config '{"backend": "sparsify"}'

A :class:`Request` is one ``update_weights``: when it returns, everything is written, or nothing.
"""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo

from sparsify.delta.served import ServedModel
from sparsify.errors import SparsifyError
from sparsify.integrations.receiver import Receiver, Request


class SparsifyWeightTransferEngine(WeightTransferEngine[WeightTransferInitInfo, Request]):
    """Writes the entries that changed into the tensors that a worker computes with."""

    init_info_cls, update_info_cls, supports_draft_weight_update = WeightTransferInitInfo, Request, False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        check_supported(vllm_config)
        with suppress(Exception):  # of the checkpoint: the first request raises it again
            _ = self._receiver

    def receive_weights(self, update_info: Request) -> None:
        """Carries out a request; raises, and changes nothing, where it cannot."""
        self._receiver.receive(update_info)

    @cached_property
    def _receiver(self) -> Receiver:
        world, path = get_world_group(), _checkpoint(self.vllm_config)
        model = ServedModel(self.model, path, self.model_config.dtype, is_shard=world.world_size > 1)
        with suppress(SparsifyError):  # where the loader refuses a tensor, a delta's own are looked up when it comes
            model.find_targets(model.checkpoint.plain_names())
        return Receiver(model, world.cpu_group)

    def init_transfer_engine(self, init_info: Any = None) -> None:
        """Does nothing: there is no connection, and an update is complete when it has been received."""

    start_weight_update = finish_weight_update = shutdown = init_transfer_engine


def check_supported(config: Any) -> None:
    """Raises where weights are not those of the checkpoint, or something else is derived from them."""
    model, parallel = config.model_config, config.parallel_config
    obstacles = {
        f"the model is quantized ({model.quantization}): serve it unquantized": model.quantization is not None,
        "multi-head latent attention keeps products of weights, which would not follow": model.use_mla,
        "EPLB moves experts between ranks: leave out --enable-eplb": parallel.enable_eplb,
        "data parallel ranks would update one by one: start a server for each": parallel.data_parallel_size > 1,
    }
    if obstacle := next((text for text, holds in obstacles.items() if holds), None):
        raise SparsifyError(f'the weight transfer backend "sparsify" does not work here: {obstacle}.')


def _checkpoint(config: Any) -> str:
    """The folder of the checkpoint that vLLM has loaded, a repository's in the cache of the hub."""
    model, cache = config.model_config, config.load_config.download_dir
    if Path(model.model).exists():
        return str(model.model)
    return snapshot_download(  # vLLM has not downloaded every file
        model.model, revision=model.revision, cache_dir=cache, allow_patterns="config.json", local_files_only=True
    )
