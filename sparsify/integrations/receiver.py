"""What a worker of an inference engine does with requests: it follows a training run, or switches between deltas."""

import base64
import io
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from sparsify.delta.served import ServedModel
from sparsify.delta.switch import DeltaSwitch
from sparsify.errors import DeltaFormatError, SparsifyError
from sparsify.stream.subscriber import DeltaSubscriber

MOST_BYTES = 2**30  # of an update
_ACTIONS = ("update", "attach", "detach", "activate", "deactivate")


@dataclass
class Request:
    """An action, in JSON's types: ``"update"``, or a method of :class:`DeltaSwitch` with its arguments.

    The bytes of an update are ``data``, in base64, or in the file ``path``.
    """

    action: str = "update"
    data: str = ""
    arguments: list[Any] = field(default_factory=list)
    path: str = ""


class Receiver:
    """Carries out requests on a model that an engine serves, between the engine's steps.

    Args:
        model: the engine's model.
        group: of the ranks that share the model, for tensors on the CPU: all of them carry out a request, or none.
    """

    def __init__(self, model: ServedModel, group: Any = None) -> None:
        self._model, self._group = model, group
        self._follower, self._switch = DeltaSubscriber(model), DeltaSwitch(model)

    def receive(self, request: Request) -> None:
        """Carries out a request, or raises and leaves everything as it was.

        Of several ranks the last one raises for all, since engines read their workers' answers only up to the first
        error, and would take the others for answers to the next call.

        Raises:
            SparsifyError: whose text begins with the class of the error, since engines hand on nothing else.
        """
        mark, attached, active = self._follower.mark(), set(self._switch), self._switch.active
        self._model.found.clear()
        error: Exception | None = None
        try:
            self._carry_out(request)
        except Exception as problem:
            error = problem
        is_refused = self._highest(torch.tensor([error is not None]).int())
        # where no rank has an error, all have looked for the same entries
        found = self._model.found if self._model.is_shard else []
        if not (is_refused or (found and not self._highest(torch.cat(found).byte()).all())):
            return
        if error is None:
            self._follower.go_back(mark)
            for name in set(self._switch) - attached:
                self._switch.detach(name)
            self._switch.activate(active) if active else self._switch.deactivate()
            error = SparsifyError("another rank of the engine refuses it, or no rank has some entries: see their logs.")
        if not self._model.is_shard or self._group.rank() == self._group.size() - 1:
            raise SparsifyError(f"{type(error).__name__}: {error}") from error
        logging.getLogger(__name__).warning("%s", error)

    def _highest(self, numbers: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' numbers."""
        if self._model.is_shard:
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=self._group)
        return numbers

    def _carry_out(self, request: Request) -> None:
        if request.action not in _ACTIONS:
            raise SparsifyError(f"the action is {request.action!r:.30}, expected one of {', '.join(_ACTIONS)}.")
        if request.action != "update":
            if self._follower.version is not None:
                raise SparsifyError("the engine follows a training run: start another one to serve deltas.")
            getattr(self._switch, request.action)(*request.arguments)
        elif names := ", ".join(self._switch):
            raise SparsifyError(f"the engine serves deltas ({names}): unload them, or use another engine.")
        else:
            self._follower.apply(read_update(request))


def read_update(request: Request) -> bytes:
    """Returns the bytes of an update; raises ``SparsifyError`` where there are none, or too many."""
    try:
        with _opened(request) as source:
            update = source.read(MOST_BYTES + 1)
    except (ValueError, OSError) as error:
        raise DeltaFormatError(f"the update cannot be read ({error}): send it again.") from error
    if len(update) > MOST_BYTES:
        raise SparsifyError(f"the update has more than {MOST_BYTES:,} bytes, of which no more are read.")
    return update


def _opened(request: Request) -> IO[bytes]:
    if bool(request.data) == bool(request.path):
        raise SparsifyError("an update comes as one of data and path: give one of them.")
    if request.data:
        return io.BytesIO(base64.b64decode(request.data[: 2 * MOST_BYTES], validate=True))
    if not Path(request.path).is_file():  # a pipe would keep the engine waiting
        raise FileNotFoundError(f"`{request.path:.200}` is no file")
    return Path(request.path).open("rb")
