"""The process of one run: trains, and adds the run's line to the results. ``runs`` starts it."""

import json
import sys
from pathlib import Path

from examples.paper.runs import append
from examples.paper.settings import Settings
from examples.paper.training import run

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    append(Path(task["path"]), run(Settings(**task["settings"]), task["device"]) | {"command": task["command"]})
