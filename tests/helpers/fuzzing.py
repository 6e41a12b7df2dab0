"""What the fuzzers have in common: a file goes through targets in a fork, and attempts by number are counted."""

import argparse
import subprocess
import sys
import warnings
from collections import Counter

import transformers
from limits import within_limits

from sparsify import SparsifyError

MEGABYTES = 48  # of address space apart from 32 x the file: 16 are promised, the rest is malloc's
SECONDS = 20  # far more than a file takes, so that a busy machine is no failure


def examine(path, targets, world, megabytes=MEGABYTES):
    """The names of the targets that end well with a file; "refused" if all raise errors of ours; "BROKEN" and how."""

    def attack():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        passed = []
        for name, target in targets.items():
            try:
                target(path, world)
                passed.append(name)
            except SparsifyError as error:
                if len(str(error)) > 4000 or not str(error).isprintable():
                    raise AssertionError(f"an unchecked message: {str(error)[:100]!a} ({name})") from None
            except Exception as error:
                raise AssertionError(f"{error!a:.300} ({name})") from None
        return " ".join(passed)

    try:
        return within_limits(attack, megabytes + 32 * path.stat().st_size / 2**20, SECONDS) or "refused"
    except Exception as error:
        return f"BROKEN: {error!a:.500}"


def count(attempt, numbers):
    """Counts of the outcomes by kind of attack, and the failures; an attempt gives both for a number."""
    counts, failures = {}, []
    for number in numbers:
        kind, outcome = attempt(number)
        counts.setdefault(kind, Counter())[outcome] += 1
        if outcome.startswith("BROKEN"):
            failures.append(f"attempt {number}: {outcome} after {kind}")
    return counts, failures


def run_alone(fuzzer, number, seed):
    """Runs a fuzzer's command: every fork of a process with other tests' threads and memory is slow, or may hang."""
    arguments = [fuzzer.__file__, "--number", str(number), "--seed", str(seed)]
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr[-5000:]


def main(fuzz, description):
    """The command line of a fuzzer: the outcomes by kind of attack; the exit status is 1 after a failure."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    for option, default in (("number", 10_000), ("seed", 0), ("first", 0)):  # of attempts
        parser.add_argument(f"--{option}", type=int, default=default)
    counts, failures = fuzz(**vars(parser.parse_args()))
    print(*(f"{kind}: {dict(counter)}" for kind, counter in sorted(counts.items())), sep="\n")
    sys.exit("\n".join(failures) or 0)
