"""The examples of transports run as a user runs them: their followers have the trainer's weights at every version."""

import copy
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from deltas import bits
from streams import Run

from examples.streaming import folder, over_http
from sparsify import DeltaFormatError, DeltaSubscriber

ROOT = Path(__file__).parents[2]

LINE = re.compile(r"version +(\d+): +([\d,]+) bytes, the follower's weights are bit-equal \([0-9a-f]{12}\)")
VERSIONS = {  # that a follower reports
    "folder": range(5, 13),  # it starts after version 8, of which there is no snapshot
    "over_http": range(8, 13),
    "broadcast": [version for version in range(13) for _ in range(2)],  # two followers
}


def printed(module, *options):
    command = [sys.executable, "-m", module, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", VERSIONS)
def test_its_follower_has_the_trainers_weights(name):
    assert len((ROOT / "examples" / "streaming" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80
    reports = [LINE.fullmatch(line).groups() for line in printed(f"examples.streaming.{name}").splitlines()]
    assert [int(version) for version, _ in reports] == list(VERSIONS[name])
    assert all(0 < int(nbytes.replace(",", "")) < 30_000 for _, nbytes in reports)


def test_a_folder_keeps_what_followers_need_and_foreign_files_and_a_damaged_one_is_refused(tmp_path):
    run = Run("mlp")
    folder.publish(tmp_path, run.publisher.snapshot())
    follower = DeltaSubscriber(copy.deepcopy(run.base))
    following = folder.follow(tmp_path, follower)
    next(following)
    for _ in range(6):
        folder.publish(tmp_path, run.step().publisher.update())
    next(following)
    assert follower.version == 1
    folder.publish(tmp_path, run.publisher.snapshot(), keep=2)
    assert sorted(path.name[-6:] for path in tmp_path.iterdir()) == ["000005", "000006", "apshot"]
    next(following)  # update 2 is gone
    assert follower.version == 6
    assert bits(follower.model) == run.expected()
    again = Run("mlp")
    again.updates(2)
    folder.publish(tmp_path, again.publisher.snapshot())  # another life of the trainer
    assert [path.name for path in tmp_path.iterdir()] == [folder.SNAPSHOT]
    next(following)
    assert (follower.version, follower.chain) == (2, again.publisher.snapshot().chain)
    foreign = [tmp_path / name for name in ("my-notes", f"{'0' * 32}-x", ".partial-old")]
    for path in foreign:
        path.touch()
    again.updates(1)
    (tmp_path / f"{follower.chain}-000003").touch()
    with pytest.raises(DeltaFormatError, match="this is no update that can be used"):
        next(following)
    folder.publish(tmp_path, again.publisher.snapshot(), keep=0)
    assert sorted(tmp_path.iterdir()) == sorted([*foreign, tmp_path / folder.SNAPSHOT])


def test_http_answers_say_whether_to_wait_or_to_take_a_snapshot():
    run, updates = Run("mlp"), {}
    routes = {route.path: route.endpoint for route in over_http.make_app(run.publisher, updates).routes}
    update, chain = routes["/updates/{version}"], run.publisher.snapshot().chain
    assert update(1, chain).status_code == 204
    for version in (1, 2, 3):
        updates[version] = run.step().publisher.update()
    del updates[1]
    assert [update(version, chain).status_code for version in (1, 2, 3, 4)] == [410, 200, 200, 204]
    assert update(2, "0" * 32).status_code == 410
    assert update(2, chain).body == bytes(updates[2])
    follower = DeltaSubscriber(copy.deepcopy(run.base))
    assert follower.apply(routes["/snapshot"]().body) == 3
    assert bits(follower.model) == run.expected()


def test_a_follower_asks_again_while_the_trainer_is_in_trouble():
    run, answers = Run("mlp"), [503, 503, 200]
    message = bytes(run.publisher.snapshot())

    class Trainer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answers.pop(0))
            self.send_header("Content-Length", str(len(message)))
            self.end_headers()
            self.wfile.write(message)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Trainer) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        follower = DeltaSubscriber(copy.deepcopy(run.base))
        assert next(over_http.follow(url, follower)) == len(message)
        assert bits(follower.model) == run.expected()
        answers += [404]
        with pytest.raises(ConnectionError, match=f"{url}/snapshot answers 404"):
            next(over_http.follow(url, follower))
        server.shutdown()
    assert answers == []


@pytest.mark.slow
def test_online_rl_learns_from_the_answers_of_its_sampler(tmp_path):
    printed("examples.online_rl", "--steps", "12", "--out", str(tmp_path))
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [point["version"] for point in curve] == list(range(12))
    assert sum(point["reward"] for point in curve[-3:]) > sum(point["reward"] for point in curve[:3]) + 0.15
    assert all(0 < point["bytes"] < 100_000 for point in curve)  # all weights take 336,128
    assert (tmp_path / "curve.png").stat().st_size
