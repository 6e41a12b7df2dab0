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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
_PAUSE_SECONDS = 0.1  # before the third attempt, and 4, 9, 16, ... times as long before the later ones


class VLLMServer:
    """A vLLM server that was started with ``--weight-transfer-config '{"backend": "sparsify"}'``.

    Args:
        url: as in ``"http://localhost:8000"``.
        in_flight: what becomes of requests that are being answered: ``"wait"`` lets them end, so that each answer is
            of one version; ``"keep"`` goes on with them in the new version; ``"abort"`` ends them.
        timeout: seconds to wait for an answer, and so for requests that are to end.
    """

    def __init__(self, url: str, *, in_flight: str = "wait", timeout: float = 600.0) -> None:
        if in_flight not in _IN_FLIGHT:
            raise SparsifyError(f"in_flight is {in_flight!r}, expected one of {', '.join(_IN_FLIGHT)}.")
        self.url, self._in_flight, self._timeout = url.rstrip("/"), in_flight, timeout

    def change(self, label: str, **request: Any) -> None:
        """Has the workers carry out a :class:`Request` between answers, which have the label from then on.

        Raises:
            SparsifyError: that of the workers, which then have changed nothing, or of the server.
            OSError: when the connection is lost; the server stays paused, since its weights may be others: repeat it.
        """
        self.call(f"pause?mode={self._in_flight}&clear_cache=true")
        try:
            try:
                self.call("start_weight_update")
            except SparsifyError:  # somebody has left an update half way
                self.call("finish_weight_update")
                self.call("start_weight_update")
            self.call("update_weights", update_info=request)
            self.call("finish_weight_update", weight_version=label)
        except SparsifyError as error:
            with suppress(SparsifyError):
                self.call("finish_weight_update")  # on those of several workers that did not raise
            if not (isinstance(error, StaleUpdateError) and "of this run" in str(error)):
                self.call("resume")
                raise
            self.call("update_weight_version", new_version=label)  # it is there, and an answer was lost
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
                text = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            found = [(getattr(errors, name, None), problem) for name, problem in _ERROR.findall(text)]
            kind, text = next(((kind, problem) for kind, problem in reversed(found) if kind), (SparsifyError, text))
            raise kind(f"{self.url}/{route} answers {error.code}: {brief(text, 1000)}") from error


class VLLMPublisher:
    """Keeps vLLM servers at the last version of a model in training, from threads of its own.

    A server that was started anew, or has missed an update, gets a snapshot; one that is slower than the training gets
    the last version only. A publisher is also a function for ``SparsifyCallback(publish=...)``, and what TRL's
    ``AsyncGRPOTrainer`` takes as ``weight_transfer``.

    Args:
        model: a sparsified model; ``None`` for TRL's trainer, which loads it: set ``publisher.model`` then.
        engines: the URL of a vLLM server, or of several.
        options: of :class:`VLLMServer`, and ``attempts``: how often a server is tried, after pauses that grow (8).
    """

    def __init__(self, model: nn.Module | None, engines: str | Sequence[str], **options: Any) -> None:
        self.model = model
        self._publisher: DeltaPublisher | None = None
        urls = [engines] if isinstance(engines, str) else engines
        self._followers = [_Follower(url, **options) for url in urls]

    def update(self) -> DeltaUpdate:
        """Makes the next version, of what the model holds now, and has it sent; call it between optimizer steps.

        Raises:
            SparsifyError: as :meth:`DeltaPublisher.update`.
        """
        if self.model is None:
            raise SparsifyError("the publisher has no model: set its `model` to what sparsify(...) returned.")
        if self._publisher is None:
            self._publisher = DeltaPublisher(self.model)
            update = self._publisher.snapshot()
        else:
            update = self._publisher.update()
        self(update)
        return update

    def __call__(self, update: DeltaUpdate) -> None:
        """Has the update of another publisher sent."""
        for follower in self._followers:
            follower.put(update)

    def wait(self) -> None:
        """Waits until all servers have the last version; raises ``SparsifyError`` when one has not taken it."""
        for follower in self._followers:
            follower.wait()

    resume = destroy = wait  # for TRL, as the methods below

    def init_weight_transfer(self) -> None:
        """Does nothing: the first version is sent as a snapshot, and a server pauses for each as briefly as it can."""

    pause = init_weight_transfer

    def send_weights(self, iterator: Iterable[object]) -> None:
        """Sends the next version, and takes the iterator's weights since all ranks have to gather them."""
        for _ in iterator:
            pass
        self.update()


class _Follower(VLLMServer):
    """A server and the thread that sends to it; Python ends when that has sent the last version."""

    def __init__(self, url: str, *, attempts: int = 8, **options: Any) -> None:
        super().__init__(url, **options)
        if type(attempts) is not int or attempts < 1:
            raise SparsifyError(f"attempts is {attempts!r}, expected an int of at least 1.")
        self._attempts, self._thread = attempts, ThreadPoolExecutor(1)
        self._next: DeltaUpdate | None = None
        self._tried: DeltaUpdate | None = None
        self._sent: tuple[str, int] | None = None
        self._error: Exception | None = None

    def put(self, update: DeltaUpdate) -> None:
        self._next = update
        self._run = self._thread.submit(self._send_next)

    def wait(self) -> None:
        if self._next is not None:
            self._run.result()
        if self._error is not None:
            raise self._error

    def _send_next(self) -> None:
        if (update := self._next) is None or update is self._tried:  # it was there when the last one was sent
            return
        self._tried, self._error = update, None
        try:
            self._send(update)
            self._sent = update.chain, update.version
        except Exception as error:
            self._error = error
            warnings.warn(f"vLLM does not have version {update.version}: {brief(error)}", stacklevel=1)

    def _send(self, update: DeltaUpdate) -> None:
        label, is_next = f"{update.chain}:{update.version}", self._sent == (update.chain, update.version - 1)
        for attempt in range(self._attempts):
            message = update if is_next and not attempt else update.snapshot()
            try:
                return self.change(label, data=base64.b64encode(bytes(message)).decode())
            except (MissingUpdateError, DeltaFormatError, OSError, http.client.HTTPException) as error:
                problem = error
                time.sleep(_PAUSE_SECONDS * attempt**2)
        with suppress(SparsifyError, OSError, http.client.HTTPException):
            self.call("resume")
        remedy = "start it, or look at its log; the next version is sent as a snapshot."
        raise SparsifyError(f"{self.url} does not take it ({brief(problem)}): {remedy}") from problem


class VLLMTasks(VLLMServer):
    """Deltas by name on a vLLM server, one of them or the sum of several active for all requests."""

    def load(self, name: str, path: StrPath) -> None:
        """Attaches a delta, by its path on the server's machine or its id on the hub, and a name without spaces."""
        if not re.fullmatch(r"[\w.-]+", name) or name == "base":
            raise SparsifyError(f"the name is {name!r:.100}, expected letters, digits, _, - and ., and not `base`.")
        local = Path(path).absolute() if Path(path).exists() else path
        self._change(self.list() | {name: False}, "attach", name, str(local))

    def unload(self, name: str) -> None:
        """Forgets a delta; if it is active, the model is the base again."""
        before = self.list()
        after = {other: active and not before.get(name) for other, active in before.items() if other != name}
        self._change(after, "detach", name)

    def activate(self, *names: str) -> None:
        """Makes a delta the active one, or the sum of several."""
        self._change({name: name in names for name in self.list()}, "activate", names)

    def deactivate(self) -> None:
        """Makes the model the base again, bit for bit."""
        self._change(dict.fromkeys(self.list(), False), "deactivate")

    def list(self) -> dict[str, bool]:
        """The names of the attached deltas, and whether each is active."""
        label = _LABEL.fullmatch(self.call("weight_info", "GET")["weight_version"])
        names = [] if label is None else [*filter(None, label[2].split(","))]
        return {name: label is not None and name in label[1].split("+") for name in names}

    def _change(self, after: Mapping[str, bool], action: str, *arguments: Any) -> None:
        active = "+".join(name for name in after if after[name]) or "base"
        self.change(f"{active} of {','.join(after)}", action=action, arguments=arguments)
