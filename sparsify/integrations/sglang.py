"""SGLang follows a model in training by its hook: ``--custom-weight-loader sparsify.integrations.sglang.load``.

    engine.update_weights_from_tensor([(checkpoint, update)], load_format="sparsify.integrations.sglang.load")

Written against the sources of SGLang 0.5.23, where an error of the hook ends the server; not run there.
"""

import base64
from typing import Any

from torch import Tensor

from sparsify.delta.served import ServedModel
from sparsify.integrations.receiver import Receiver, Request

_RECEIVER = "_sparsify_receiver"  # attribute of SGLang's model


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Takes updates on all ranks or on none: pairs of the checkpoint's path and bytes (n,) uint8; as a Receiver."""
    from sglang.srt.distributed import get_world_group

    for checkpoint, update in named_tensors:
        if _RECEIVER not in vars(model):
            world, dtype = get_world_group(), next(model.parameters()).dtype
            served = ServedModel(model, checkpoint, dtype, is_shard=world.world_size > 1)
            vars(model)[_RECEIVER] = Receiver(served, world.cpu_group)
        vars(model)[_RECEIVER].receive(Request(data=base64.b64encode(update.cpu().numpy().data).decode()))
