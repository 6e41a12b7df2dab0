"""The trainer's side of vLLM: keeps servers at a model's last version, and has a server switch between deltas.

    VLLMPublisher --pause, start_weight_update, update_weights, finish_weight_update, resume--> vllm serve

A server has these routes with ``VLLM_SERVER_DEV_MODE=1`` in its environment: keep it off networks that are not trusted.
"""

import base64
import http.client
import json
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from sparsify import errors
from sparsify.delta.entries import StrPath
from sparsify.errors import DeltaFormatError, MissingUpdateError, SparsifyError, StaleUpdateError, brief
from sparsify.stream.publisher import DeltaPublisher, DeltaUpdate

_IN_FLIGHT = ("wait", "keep", "abort")
_ERROR = re.compile(r"(\w+Error): ((?:(?!\w+Error: |', please check).)*)", re.DOTALL)  # as a worker writes it
_LABEL = re.compile(r"(\S+) of (.*)")  # of active deltas, or `base`, and of all
_FIRST_PAUSE_SECONDS = 0.2  # before a second attempt


class VLLMServer:
    """A vLLM server that was started with ``--weight-transfer-config '{"backend": "sparsify"}'``.

    Args:
        url: as in ``"http://localhost:8000"``.
        in_flight: what becomes of requests that are being answered: ``"wait"`` lets them end, so that each answer is
            of one version; ``"keep"`` goes on with them in the new version; ``"abort"`` ends them.
        timeout: seconds to wait for an answer, and so for requests that are to end.
    """

    def __init__(self, url: str, in_flight: str = "wait", timeout: float = 600.0) -> None:
        if in_flight not in _IN_FLIGHT:
            raise SparsifyError(f"in_flight is {in_flight!r}, expected one of {', '.join(_IN_FLIGHT)}.")
        self.url, self._in_flight, self._timeout = url.rstrip("/"), in_flight, timeout

    def change(self, label: str, **request: Any) -> None:
        """Has the workers carry out a :class:`Request` between answers, and empties the caches.

        Raises:
            SparsifyError: that of the workers, which then have changed nothing, or of the server.
            OSError: when the connection is lost.
        """
        self.call(f"pause?mode={self._in_flight}&clear_cache=true")
        try:
            try:
                self.call("start_weight_update")
            except SparsifyError:  # somebody has left an update half way
                self.call("finish_weight_update")
                self.call("start_weight_update")
            try:
                self.call("update_weights", update_info=request)
            except SparsifyError:
                with suppress(SparsifyError):
                    self.call("finish_weight_update")  # on those of several workers that did not raise
                raise
            self.call("finish_weight_update", weight_version=label)
        finally:
            self.call("resume")

    def call(self, route: str, method: str = "POST", **body: Any) -> Any:
        """Returns what a route answers."""
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(10_000).decode(errors="replace")
            if error.code == 404:
                text = "it lacks the route: start it with VLLM_SERVER_DEV_MODE=1 in its environment."
            raise typed_error(text, f"{self.url}/{route} answers {error.code}") from error


def typed_error(text: str, where: str) -> SparsifyError:
    """A worker's error from what the server says about it."""
    for name, problem in reversed(_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SparsifyError):
            return kind(f"{where}: {brief(problem, 1000)}")
    return SparsifyError(f"{where}: {brief(text, 1000)}")


class VLLMPublisher:
    """Keeps vLLM servers at the last version of a model in training, from threads of its own.

    A server that was started anew, or has missed an update, gets a snapshot; one that is slower than the training gets
    the last version only. A publisher is also a function for ``SparsifyCallback(publish=...)``, and what TRL's
    ``AsyncGRPOTrainer`` takes as ``weight_transfer``.

    Args:
        model: a sparsified model; ``None`` for TRL's trainer, which loads it: set ``publisher.model`` then.
        engines: the URL of a vLLM server, or of several.
        in_flight: what becomes of requests that are being answered, as in :class:`VLLMServer`.
        timeout: seconds to wait for an answer.
        attempts: number of times that a server is tried, after pauses that double.
    """

    def __init__(
        self, model: nn.Module | None, engines: str | Sequence[str], *, in_flight: str = "wait",
        timeout: float = 600.0, attempts: int = 5,
    ) -> None:  # fmt: skip
        self.model, self._publisher = model, None
        urls = [engines] if isinstance(engines, str) else engines
        self._channels = [_Channel(VLLMServer(url, in_flight, timeout), attempts) for url in urls]

    def update(self) -> DeltaUpdate:
        """Makes the next version, of what the model holds now, and has it sent; call it between optimizer steps.

        Raises:
            SparsifyError: as :meth:`DeltaPublisher.update`.
        """
        if self.model is None:
            raise SparsifyError("the publisher has no model: set its `model` to what sparsify(...) returned.")
        is_first = self._publisher is None
        self._publisher = self._publisher or DeltaPublisher(self.model)
        update = self._publisher.snapshot() if is_first else self._publisher.update()
        self(update)
        return update

    def __call__(self, update: DeltaUpdate) -> None:
        """Has the update of another publisher sent."""
        for channel in self._channels:
            channel.put(update)

    def wait(self) -> None:
        """Waits until all servers have the last version; raises ``SparsifyError`` when one has not taken it."""
        for channel in self._channels:
            channel.wait()

    resume = destroy = wait  # for TRL, as the methods below

    def init_weight_transfer(self) -> None:
        """Does nothing: the first version is sent as a snapshot."""

    pause = init_weight_transfer  # a server pauses for each version, as briefly as it can

    def send_weights(self, iterator: Iterable[object]) -> None:
        """Sends the next version, and takes the iterator's weights since all ranks have to gather them."""
        for _ in iterator:
            pass
        self.update()


class _Channel:
    """Sends to one server, in a thread of its own; Python ends when that has sent the last version."""

    def __init__(self, server: VLLMServer, attempts: int) -> None:
        self._server, self._attempts, self._pool = server, attempts, ThreadPoolExecutor(1)
        self._next: DeltaUpdate | None = None
        self._tried: DeltaUpdate | None = None
        self._sent: tuple[str, int] | None = None
        self._error: Exception | None = None
        self._runs: list[Future[None]] = []

    def put(self, update: DeltaUpdate) -> None:
        self._next = update
        self._runs = [run for run in self._runs if not run.done()] + [self._pool.submit(self._run)]

    def wait(self) -> None:
        for run in self._runs:
            run.result()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if (update := self._next) is None or update is self._tried:  # an earlier run has sent it
            return
        self._tried, self._error = update, None
        try:
            self._send(update)
            self._sent = update.chain, update.version
        except Exception as error:
            self._error = error
            warnings.warn(f"vLLM does not have version {update.version}: {brief(error)}", stacklevel=1)

    def _send(self, update: DeltaUpdate) -> None:
        label, snapshot = f"{update.chain}:{update.version}", self._sent != (update.chain, update.version - 1)
        for attempt in range(self._attempts):
            try:
                message = update.snapshot() if snapshot else update
                return self._server.change(label, data=base64.b64encode(bytes(message)).decode())
            except StaleUpdateError as error:
                if "of this run" not in str(error):
                    raise
                return self._server.call("update_weight_version", new_version=label)  # it is there; an answer was lost
            except (MissingUpdateError, DeltaFormatError):
                if attempt == self._attempts - 1:
                    raise
            except (OSError, http.client.HTTPException) as error:
                if attempt == self._attempts - 1:
                    problem = f"{self._server.url} cannot be reached ({brief(error)})"
                    raise SparsifyError(f"{problem}: start it; the next version is sent as a snapshot.") from error
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
            snapshot = True
        return None


class VLLMTasks:
    """Deltas by name on a vLLM server, one of them or the sum of several active for all requests.

    Args:
        url: of the server.
        options: of :class:`VLLMServer`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._server = VLLMServer(url, **options)

    def load(self, name: str, path: StrPath) -> None:
        """Attaches a delta, by its path on the server's machine or its id on the hub, and a name without spaces."""
        if not re.fullmatch(r"[\w.-]+", name) or name == "base":
            raise SparsifyError(f"the name is {name!r:.100}, expected letters, digits, _, - and ., and not `base`.")
        local = Path(path).absolute() if Path(path).exists() else path
        self._change("load", [name], self._state()[0], [*self.list(), name], path=str(local))

    def unload(self, name: str) -> None:
        """Forgets a delta; an active one is deactivated."""
        active = self._state()[0]
        self._change("unload", [name], [] if name in active else active, [n for n in self.list() if n != name])

    def activate(self, *names: str) -> None:
        """Makes a delta the active one, or the sum of several."""
        self._change("activate", names, names, self.list())

    def deactivate(self) -> None:
        """Makes the model the base again, bit for bit."""
        self._change("deactivate", [], [], self.list())

    def list(self) -> dict[str, bool]:
        """The names of the attached deltas, and whether each is active."""
        active, names = self._state()
        return {name: name in active for name in names}

    def _state(self) -> tuple[Sequence[str], Sequence[str]]:
        label = _LABEL.fullmatch(self._server.call("weight_info", "GET")["weight_version"])
        return ([], []) if label is None else (label[1].split("+"), [*filter(None, label[2].split(","))])

    def _change(
        self, action: str, names: Sequence[str], active: Sequence[str], all_names: Iterable[str], **more: str
    ) -> None:
        label = f"{'+'.join(active) or 'base'} of {','.join(all_names)}"
        self._server.change(label, action=action, names=names, **more)
