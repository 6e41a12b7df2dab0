"""The trainer's side of vLLM: sends a model's versions to servers, and has a server switch between deltas.

    VLLMPublisher --pause, start_weight_update, update_weights, finish_weight_update, resume--> vllm serve

A server has these routes with ``VLLM_SERVER_DEV_MODE=1`` in its environment: keep it off networks that are not trusted.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterable, Sequence
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
_UNREACHABLE = (OSError, http.client.HTTPException)
_FIRST_PAUSE_SECONDS = 0.2  # before a second attempt
_LABEL = re.compile(r"(\S+) of (.*)")


class VLLMServer:
    """A vLLM server that was started with ``--weight-transfer-config '{"backend": "sparsify"}'``.

    Args:
        url: as in ``"http://localhost:8000"``.
        in_flight: what becomes of requests that are being answered: ``"wait"`` lets them end, so that each answer is
            of one version; ``"keep"`` goes on with them in the new version; ``"abort"`` ends them.
        timeout: in seconds, of one of its answers, and so of the requests that are waited for.
    """

    def __init__(self, url: str, in_flight: str = "wait", timeout: float = 600.0) -> None:
        if in_flight not in _IN_FLIGHT:
            raise SparsifyError(f"in_flight is {in_flight!r}, expected one of {', '.join(_IN_FLIGHT)}.")
        self.url, self._in_flight, self._timeout = url.rstrip("/"), in_flight, timeout

    def change(self, request: dict[str, Any], label: str) -> None:
        """Has the workers carry out a :class:`Request` while no request is being answered; caches are emptied.

        Raises:
            SparsifyError: that of the workers, or of the server; they have changed nothing.
        """
        self._post("pause", query={"mode": self._in_flight, "clear_cache": "true"})
        try:
            self._change(request, label)
        finally:
            self._post("resume")

    def label(self) -> str:
        """The label of the last change; ``"default"`` before the first."""
        return str(self._send("weight_info", None)["weight_version"])

    def _change(self, request: dict[str, Any], label: str) -> None:
        try:
            self._post("start_weight_update")
        except SparsifyError:  # somebody has left an update half way, of which nothing is written
            self._post("finish_weight_update")
            self._post("start_weight_update")
        try:
            self._post("update_weights", {"update_info": request})
        except SparsifyError as error:
            with suppress(SparsifyError):
                self._post("finish_weight_update")  # on those of several workers that did not raise
            if isinstance(error, StaleUpdateError):
                self._post("update_weight_version", {"new_version": label})
            raise
        self._post("finish_weight_update", {"weight_version": label})

    def _post(self, route: str, body: dict[str, Any] | None = None, query: dict[str, str] | None = None) -> None:
        self._send(f"{route}?{urllib.parse.urlencode(query)}" if query else route, json.dumps(body or {}).encode())

    def _send(self, route: str, data: bytes | None) -> Any:
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read(10_000).decode(errors="replace")
            if error.code == 404:
                remedy = "start it with VLLM_SERVER_DEV_MODE=1 in its environment."
                raise SparsifyError(f"{self.url} has no route `{route}`: {remedy}") from error
            raise typed_error(text, f"{self.url}/{route} answers {error.code}: ") from error


def typed_error(text: str, where: str = "") -> SparsifyError:
    """A worker's error from what the engine says about it."""
    for name, problem in reversed(_ERROR.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, SparsifyError):
            return kind(f"{where}{brief(problem, 1000)}")
    return SparsifyError(f"{where}{brief(text, 1000)}")


class VLLMPublisher:
    """Keeps vLLM servers at the last version of a model in training, from threads of its own.

    A server that was started anew, or has missed an update, gets a snapshot; one that is slower than the training gets
    the last version only. It is a function for ``SparsifyCallback(publish=...)``, and TRL's ``weight_transfer`` for
    ``AsyncGRPOTrainer``.

    Args:
        model: a sparsified model; for TRL's trainer, which loads it, it is set later: ``publisher.model = ...``.
        engines: the URL of a vLLM server, or of several.
        in_flight: what becomes of requests that are being answered, as in :class:`VLLMServer`.
        timeout: seconds to wait for an answer.
        attempts: number of times that an unreachable server is tried, after pauses that double.

    Example:
        >>> publisher = VLLMPublisher(model, "http://localhost:8000")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     train(model, batch)
        ...     publisher.update()
        >>> publisher.wait()  # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module | None, engines: str | Sequence[str], *, in_flight: str = "wait",
        timeout: float = 600.0, attempts: int = 5,
    ) -> None:  # fmt: skip
        self.model = model
        self._publisher: DeltaPublisher | None = None
        urls = [engines] if isinstance(engines, str) else engines
        self._channels = [_Channel(VLLMServer(url, in_flight, timeout), attempts) for url in urls]

    def update(self) -> DeltaUpdate:
        """Makes the next version, of what the model holds now, and has it sent; call it between optimizer steps.

        Raises:
            SparsifyError: as :meth:`DeltaPublisher.update`.
        """
        if self._publisher is None:
            if self.model is None:
                raise SparsifyError("the publisher has no model: set its `model` to what sparsify(...) returned.")
            self._publisher = DeltaPublisher(self.model)
            update = self._publisher.snapshot()
        else:
            update = self._publisher.update()
        self(update)
        return update

    def __call__(self, update: DeltaUpdate) -> None:
        """Has an update of another publisher sent."""
        for channel in self._channels:
            channel.put(update)

    def wait(self) -> None:
        """Waits until all servers have the last version.

        Raises:
            SparsifyError: when one of them has not taken it.
        """
        for channel in self._channels:
            channel.wait()

    def init_weight_transfer(self) -> None:
        """Does nothing; from here on are the methods that TRL calls."""

    def pause(self) -> None:
        """Does nothing: a server pauses as short as it has to."""

    def send_weights(self, iterator: Iterable[object]) -> None:
        """Sends the next version; the iterator's weights are only taken from it, as ranks that gather them need."""
        for _ in iterator:
            pass
        self.update()

    def resume(self) -> None:
        self.wait()

    def destroy(self) -> None:
        self.wait()


class _Channel:
    """Sends to one server, from a thread that lives while there is something to send; Python's end waits for it."""

    def __init__(self, server: VLLMServer, attempts: int) -> None:
        self._server, self._attempts = server, attempts
        self._next: DeltaUpdate | None = None
        self._sent: tuple[str, int] | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, update: DeltaUpdate) -> None:
        with self._lock:
            self._next = update
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"updates of {self._server.url}")
                self._thread.start()

    def wait(self) -> None:
        while (thread := self._thread) is not None:
            thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._lock:
                update, self._next = self._next, None
                if update is None:
                    self._thread = None
                    return
            try:
                self._send(update)
                self._error = None
            except Exception as error:
                self._error = error
                warnings.warn(f"vLLM does not have version {update.version}: {brief(error)}", stacklevel=1)

    def _send(self, update: DeltaUpdate) -> None:
        follows = update.is_snapshot or self._sent == (update.chain, update.version - 1)
        message = update if follows else update.snapshot()
        label = f"{update.chain}:{update.version}"
        for attempt in range(self._attempts):
            is_last = attempt == self._attempts - 1
            try:
                self._server.change({"data": base64.b64encode(bytes(message)).decode()}, label)
            except StaleUpdateError as error:
                if "of this run" not in str(error):  # else an answer was lost
                    raise
            except (MissingUpdateError, DeltaFormatError):
                if is_last:
                    raise
                message = update.snapshot()
                continue
            except _UNREACHABLE as error:
                if is_last:
                    problem = f"{self._server.url} cannot be reached ({brief(error)})"
                    raise SparsifyError(f"{problem}: start it; the next version is sent as a snapshot.") from error
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
                continue
            self._sent = update.chain, update.version
            return


class VLLMTasks:
    """Deltas by name on a vLLM server, one of them or the sum of several active for all requests.

    Args:
        url: of the server.
        in_flight: what becomes of requests that are being answered, as in :class:`VLLMServer`.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str, *, in_flight: str = "wait", timeout: float = 600.0) -> None:
        self._server = VLLMServer(url, in_flight, timeout)

    def load(self, name: str, path: StrPath) -> None:
        """Attaches a delta by a name.

        Args:
            name: of letters, digits, ``_``, ``-`` and ``.``.
            path: of the delta on the server's machine, or its id on the hub.

        Raises:
            SparsifyError: when the server does not take it.
        """
        if not re.fullmatch(r"[\w.-]+", name) or name == "base":
            expected = "expected letters, digits, _, - and ., and not `base`."
            raise SparsifyError(f"a delta's name is {name!r:.100}, {expected}")
        active, names = self._state()
        path = str(Path(path).absolute()) if Path(path).exists() else str(path)
        self._change("load", [name], active, [*names, name], path=path)

    def unload(self, name: str) -> None:
        """Forgets a delta; an active one is deactivated."""
        active, names = self._state()
        rest = [other for other in names if other != name]
        self._change("unload", [name], () if name in active else active, rest)

    def activate(self, *names: str) -> None:
        """Makes a delta the active one, or the sum of several."""
        self._change("activate", list(names), names, self._state()[1])

    def deactivate(self) -> None:
        """Makes the model the base again, bit for bit."""
        self._change("deactivate", [], (), self._state()[1])

    def list(self) -> dict[str, bool]:
        """The names of the attached deltas, and whether each is active."""
        active, names = self._state()
        return {name: name in active for name in names}

    def _state(self) -> tuple[Sequence[str], Sequence[str]]:
        if (label := _LABEL.fullmatch(self._server.label())) is None:
            return (), ()
        return [] if label[1] == "base" else label[1].split("+"), [name for name in label[2].split(",") if name]

    def _change(
        self, action: str, names: Sequence[str], active: Sequence[str], attached: Sequence[str], **more: str
    ) -> None:
        label = f"{'+'.join(active) or 'base'} of {','.join(attached)}"
        self._server.change({"action": action, "names": names, **more}, label)
