"""The examples of transports run as a user runs them: their followers have the trainer's weights at every version."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deltas import bits
from streams import Run

from sparsify import DeltaSubscriber

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # holds the package `examples`
from examples.streaming import folder, over_http  # noqa: E402

LINE = re.compile(r"version +(\d+): +([\d,]+) bytes, the follower's weights are bit-equal \([0-9a-f]{12}\)")
VERSIONS = {  # that a follower reports
    "folder": range(5, 13),  # it starts after version 8, of which there is no snapshot
    "over_http": range(8, 13),
    "broadcast": [version for version in range(13) for _ in range(2)],  # two followers
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERSIONS)
def test_its_follower_has_the_trainers_weights(name):
    assert len((ROOT / "examples" / "streaming" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80
    command = [sys.executable, "-m", f"examples.streaming.{name}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    reports = [LINE.fullmatch(line).groups() for line in run.stdout.splitlines()]
    assert [int(version) for version, _ in reports] == list(VERSIONS[name])
    assert all(0 < int(nbytes.replace(",", "")) < 30_000 for _, nbytes in reports)


def test_a_folder_keeps_what_followers_need_and_no_more(tmp_path):
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
