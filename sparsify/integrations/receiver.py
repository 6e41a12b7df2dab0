"""What a worker of an inference engine does with requests: it follows a training run, or switches between deltas.

    request --read--> bytes --DeltaSubscriber--> ServedModel: the engine's own memory
    request ----------------> names --DeltaSwitch-->

Where several ranks share a model, a request is carried out by all of them or by none.
"""

from __future__ import annotations

import base64
import binascii
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsify.delta.served import ServedModel
from sparsify.delta.switch import DeltaSwitch
from sparsify.errors import DeltaFormatError, SparsifyError, brief
from sparsify.stream.subscriber import DeltaSubscriber, Mark

MOST_BYTES = 2**30  # of an update
_ERROR_BYTES = 2000
_URL_SECONDS = 60
_HERE = {"localhost", "127.0.0.1", "::1"}


@dataclass
class Request:
    """A request to a worker, in JSON's types.

    Attributes:
        action: ``"update"``, with an update of a stream as one of ``data``, ``path`` and ``url``; ``"load"``, with the
            ``path`` of a delta and the name to attach it by; ``"unload"``; ``"activate"``, with one or several names;
            or ``"deactivate"``.
        names: of attached deltas.
        data: an update's bytes, in base64.
        path: of a file on the worker's machine.
        url: by which the worker's machine itself has an update (http://localhost).
    """

    action: str = "update"
    names: list[str] = field(default_factory=list)
    data: str | None = None
    path: str | None = None
    url: str | None = None


@dataclass
class Ranks:
    """The ranks that share a model: how many, this one's number, and the elementwise maximum of all ranks' numbers."""

    size: int = 1
    rank: int = 0
    highest: Callable[[Tensor], Tensor] = lambda numbers: numbers

    def first_error(self, error: Exception | None) -> str | None:
        """The error of the first rank that has one, with the name of its class; all ranks have to call it."""
        first = int(self.highest(torch.tensor([self.size - self.rank if error else 0], dtype=torch.int64)))
        if not first:
            return None
        text = torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
        if first == self.size - self.rank:
            # the engine hands on an error's text alone
            own = f"{type(error).__name__}: {error}".encode()[:_ERROR_BYTES]
            text[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return bytes(self.highest(text).tolist()).rstrip(b"\0").decode(errors="replace")


class Receiver:
    """Carries out requests on a model that an engine serves, between the engine's steps.

    Args:
        model: the engine's model.
        ranks: those that share it.
    """

    def __init__(self, model: ServedModel, ranks: Ranks | None = None) -> None:
        self._model, self._ranks = model, ranks or Ranks()
        self._follower, self._switch = DeltaSubscriber(model), DeltaSwitch(model)

    def receive(self, request: Request) -> None:
        """Carries out a request, or raises and leaves everything as it was.

        Where there are several ranks, the last one raises for all of them: engines stop reading their workers' answers
        at the first error, and would take those left for answers to the next call.

        Raises:
            SparsifyError: with the first failing rank's error, which begins with its class.
        """
        mark, active = self._follower.mark(), self._switch.active
        error: Exception | None = None
        self._model.found.clear()
        try:
            self._carry_out(request)
        except Exception as problem:
            error = problem
        text = self._ranks.first_error(error)
        if text is None and self._ranks.size > 1 and (found := self._model.found):
            missing = int((self._ranks.highest(torch.cat(found).byte()) == 0).sum())  # the same on all ranks
            text = f"BaseMismatchError: no rank of the engine has {missing:,} of the entries." if missing else None
        if text is None:
            return
        if error is None:
            self._undo(request, mark, active)
        if self._ranks.rank == self._ranks.size - 1:
            raise SparsifyError(text) from error

    def _carry_out(self, request: Request) -> None:
        if request.action == "update":
            if len(self._switch):
                names = ", ".join(self._switch)
                raise SparsifyError(f"the engine serves deltas ({names}): unload them, or use another engine.")
            self._follower.apply(read_update(request))
            return
        if self._follower.version is not None:
            raise SparsifyError("the engine follows a training run: start another one to serve deltas.")
        if request.action == "load" and request.path is not None and len(request.names) == 1:
            self._switch.attach(request.names[0], request.path)
        elif request.action == "unload" and request.names:
            for name in request.names:
                self._switch.detach(name)
        elif request.action == "activate" and request.names:
            self._switch.activate(request.names if len(request.names) > 1 else request.names[0])
        elif request.action == "deactivate":
            self._switch.deactivate()
        else:
            expected = "expected update, load (a name and a path), unload, activate (names) or deactivate."
            raise SparsifyError(f"the request is {request.action!r:.30} of {len(request.names)} names; {expected}")

    def _undo(self, request: Request, mark: Mark, active: str | tuple[str, ...] | None) -> None:
        if request.action == "update":
            self._follower.go_back(mark)
        elif request.action == "load":
            self._switch.detach(request.names[0])
        elif active is None:
            self._switch.deactivate()
        else:
            self._switch.activate(active)


def read_update(request: Request) -> bytes:
    """The bytes of the update in a request; raises where they cannot be had, or are more than ``MOST_BYTES``."""
    if (request.data is None) == (request.path is None):
        raise SparsifyError("an update is either data or path, and the request has both or none.")
    try:
        nbytes = len(request.data) * 3 // 4 if request.path is None else Path(request.path).stat().st_size
        if nbytes > MOST_BYTES:
            raise SparsifyError(f"the update has {nbytes:,} bytes, and at most {MOST_BYTES:,} are read.")
        return base64.b64decode(request.data, validate=True) if request.path is None else Path(request.path).read_bytes()
    except OSError as error:
        raise SparsifyError(f"the update cannot be read ({brief(error)}): send it again.") from error
    except binascii.Error as error:
        raise DeltaFormatError(f"the request's data is no base64 ({brief(error)}): send it again.") from error
