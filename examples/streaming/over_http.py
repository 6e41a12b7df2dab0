"""A model in training feeds followers over HTTP, without authentication. Needs the extra ``serve``.

python -m examples.streaming.over_http

GET /snapshot                    the last version as a whole
GET /updates/{version}?chain=    the update to a version of a run; 204 while it is not there yet; 410 where it is
                                 there no more, or the run is another: take the snapshot
"""

import socket
import threading
import time
from collections.abc import Iterator

import urllib3
import uvicorn
from fastapi import FastAPI, Response

from examples.streaming.tiny_run import LATE, STEPS, TinyRun
from sparsify import DeltaPublisher, DeltaSubscriber, DeltaUpdate

KEEP = 10  # updates, for followers that are behind
RETRIES = urllib3.Retry(10, backoff_factor=0.1, backoff_max=5, status_forcelist=range(500, 600))  # for half a minute


def make_app(publisher: DeltaPublisher, updates: dict[int, DeltaUpdate]) -> FastAPI:
    app = FastAPI(title="A model in training")

    @app.get("/snapshot")
    def snapshot() -> Response:
        return Response(bytes(publisher.snapshot()))

    @app.get("/updates/{version}")
    def update(version: int, chain: str) -> Response:
        found = updates.get(version)
        if found is not None and chain == found.chain:
            return Response(bytes(found))
        gone = chain != publisher.snapshot().chain or version <= max(tuple(updates), default=0)
        return Response(status_code=410 if gone else 204)

    return app


def follow(url: str, follower: DeltaSubscriber) -> Iterator[int]:
    """Brings a follower to each version that comes, and yields the message's bytes."""
    http, path = urllib3.PoolManager(retries=RETRIES), "snapshot"
    while True:
        answer = http.request("GET", f"{url}/{path}")
        if answer.status == 200:
            follower.apply(answer.data)
            yield len(answer.data)
            path = f"updates/{follower.version + 1}?chain={follower.chain}"
        elif answer.status == 204:
            time.sleep(0.01)
        elif answer.status == 410:
            path = "snapshot"
        else:
            raise ConnectionError(f"{url}/{path} answers {answer.status}: is it the trainer's address?")


def main() -> None:
    run, updates = TinyRun(), {}
    server = uvicorn.Server(uvicorn.Config(make_app(run.publisher, updates), log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))  # requests wait here until the server is up
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    for version in range(1, STEPS + 1):
        updates[version] = run.step()
        updates.pop(version - KEEP, None)
        if version == LATE:
            run.start_follower(follow, "http://{}:{}".format(*listening.getsockname()))
        run.compare()


if __name__ == "__main__":
    main()
