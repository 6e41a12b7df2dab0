"""SGLang follows a model in training by its hook: ``--custom-weight-loader sparsify.integrations.sglang.load``.

    engine.update_weights_from_tensor([(checkpoint, bytes of an update)], load_format="sparsify.integrations.sglang.load")

Written against the sources of SGLang 0.5.23, where an error of the hook ends the server; not run there.
"""

import base64
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparsify.delta.served import ServedModel
from sparsify.errors import SparsifyError
from sparsify.integrations.receiver import Receiver, Request

_RECEIVER = "_sparsify_receiver"  # attribute of SGLang's model


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Brings SGLang's model to the version of an update, on all ranks or on none.

    Args:
        model: as SGLang gives it.
        named_tensors: one pair: the path of the checkpoint that SGLang has loaded, and the update, (n,) uint8.

    Raises:
        SparsifyError: whose text begins with the class of the error; nothing has changed.
    """
    from sglang.srt.distributed import get_world_group

    if len(named_tensors) != 1:
        raise SparsifyError(f"the hook gets one pair, of a checkpoint and an update, and got {len(named_tensors)}.")
    ((checkpoint, update),) = named_tensors
    if _RECEIVER not in vars(model):
        world, dtype = get_world_group(), next(model.parameters()).dtype
        served = ServedModel(model, checkpoint, dtype, is_shard=world.world_size > 1)
        vars(model)[_RECEIVER] = Receiver(served, world.cpu_group)
    vars(model)[_RECEIVER].receive(Request(data=base64.b64encode(update.cpu().numpy()).decode()))
