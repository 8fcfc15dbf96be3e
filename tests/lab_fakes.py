"""Claims that are quick, fail, crash or take their time, for tests of runs and of the store."""

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from onelayer.lab import pools
from onelayer.lab.claim import Check, Claim, grid
from onelayer.lab.run import Plan, run
from onelayer.lab.store import Store

FACTOR = 2


def _doubled(number):
    return FACTOR * number


def double(number, seed, kind=""):
    return {"value": _doubled(number) + seed}


def falter(number, seed):
    if number == 2:
        raise RuntimeError("two is too much")
    return {"value": number}


def immeasurable(number, seed):
    return [{}, {"value": [number, float("inf")]}, {"value": {}}][number]


def leave(number, seed):
    if number == 0:
        sys.exit(3)
    raise RuntimeError("no character: \udcff")


def die(number, seed):
    if number == 2:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return {"value": number}


def logged(number, log, seconds, seed):
    """Writes a line when it is measured, so that it shows how often it was."""
    time.sleep(seconds)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{number}\n")
    return {"value": number}


def deadly(number, log, kills, seed):
    """As `logged`; `kills` times in all it has the run killed at some moment soon after."""
    deadline = Path(f"{log}.killed{number // 5}")
    if number // 5 < kills and number % 5 == 3 and not deadline.exists():
        deadline.touch()
        delay = random.Random(number).uniform(0, 0.03)
        threading.Timer(delay, os.kill, [os.getppid(), signal.SIGKILL]).start()
    return logged(number, log, 0.005, seed)


def judge(results):
    return [Check("all values are below 100", "yes", max(results.numbers("value")) < 100)]


def claim(measure, name=None, **settings):
    """A claim with this measurement and these settings, for all sizes."""
    settings = {"number": [0, 1, 2, 3], "seeds": 1} | settings
    return Claim(
        name=name or measure.__name__,
        title=f"A claim that can {measure.__name__}",
        source="arXiv 2307.11353",
        prediction="values are small",
        rule="all values are below 100",
        sizes={"quick": settings, "default": settings, "paper": settings},
        cells=grid,
        measure=measure,
        judge=judge,
        draw=lambda results, figure: figure.subplots().plot(results.numbers("value")),
    )


class Threads:
    """A pool of threads in the place of processes, which take seconds to start."""

    def __init__(self, places):
        self.places = places
        self.executor = ThreadPoolExecutor(places)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.executor.shutdown()

    def submit(self, measure, parameters, code):
        return self.executor.submit(pools.measured, measure, parameters, code)


def main(measure, store, log, count, number, workers):
    """A run that can be killed, as a program of its own."""
    last = {"kills": int(number)} if measure == "deadly" else {"seconds": float(number)}
    fake = claim(globals()[measure], number=list(range(int(count))), log=log, **last)
    run([Plan(fake, "quick")], Store(Path(store)), workers=int(workers))


if __name__ == "__main__":
    import lab_fakes  # processes of the pool know it by this name

    lab_fakes.main(*sys.argv[1:])
