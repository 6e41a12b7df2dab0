"""The weight transfer backend "sparsify" of vLLM: updates of a stream, and deltas by name, in a worker's own memory.

    vllm serve MODEL --weight-transfer-config '{"backend": "sparsify"}'

An update is one ``update_weights`` between ``start_weight_update`` and ``finish_weight_update``, which do nothing here:
all of it is checked, written, or undone by then.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from sparsify.delta.served import ServedModel
from sparsify.errors import SparsifyError
from sparsify.integrations.receiver import Ranks, Receiver, Request


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: a worker needs no connection to the trainer."""


@dataclass
class UpdateInfo(Request, WeightTransferUpdateInfo):
    """A :class:`Request`."""


class SparsifyWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Writes the entries that changed into the tensors that a worker computes with; see the module."""

    init_info_cls, update_info_cls, supports_draft_weight_update = InitInfo, UpdateInfo, False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        _check_supported(vllm_config)
        self._receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Does nothing."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Carries out a request; raises, and changes nothing, where it cannot."""
        if self._receiver is None:
            ranks, config = _ranks(), self.model_config
            model = ServedModel(self.model, _checkpoint(self.vllm_config), config.dtype, is_shard=ranks.size > 1)
            self._receiver = Receiver(model, ranks)
        self._receiver.receive(update_info)

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def shutdown(self) -> None:
        """Does nothing: the weights stay as they are."""


def _check_supported(config: Any) -> None:
    """Raises where weights are not as in the checkpoint, or something else derives numbers from them."""
    model, parallel = config.model_config, config.parallel_config
    obstacles = {
        f"the model is quantized ({model.quantization}): serve it unquantized": model.quantization is not None,
        "multi-head latent attention keeps products of weights, which would not follow": model.use_mla,
        "EPLB moves experts between ranks: leave out --enable-eplb": parallel.enable_eplb,
        "data parallel ranks update one by one: start a server for each": parallel.data_parallel_size > 1,
    }
    if obstacle := next((text for text, holds in obstacles.items() if holds), None):
        raise SparsifyError(f'the weight transfer backend "sparsify" does not work here: {obstacle}.')


def _checkpoint(config: Any) -> str:
    """The folder of the checkpoint that vLLM has loaded, a repository's in the cache of the hub."""
    model = config.model_config
    if Path(model.model).exists():
        return str(model.model)
    return snapshot_download(
        model.model, revision=model.revision, cache_dir=config.load_config.download_dir, local_files_only=True
    )


def _ranks() -> Ranks:
    world = get_world_group()

    def highest(numbers: Tensor) -> Tensor:
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=world.cpu_group)
        return numbers

    return Ranks(world.world_size, world.rank_in_group, highest) if world.world_size > 1 else Ranks()
