"""Two Spark tasks that meet and leave again, many times: how long does it take, and does it ever fail?

    python benchmarks/rendezvous.py [--rounds 200]

Each round is a launch with everything but a training: barrier tasks, handshake, doors, a process forked on each worker,
a value back from both. The first one also imports TensorFlow and is told apart.
"""

from __future__ import annotations

import argparse
import statistics
import time

from peers import spark_cluster

from tfdist.environ import adopt
from tfdist.errors import TfdistError
from tfdist.launch.program import dump_program
from tfdist.launch.protocol import LaunchPlan, new_run_id
from tfdist.launch.spark import SparkLauncher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    adopt({"CUDA_VISIBLE_DEVICES": "-1"})
    seconds: list[float] = []
    failures: list[str] = []
    with spark_cluster() as spark:
        launcher, program = SparkLauncher(spark), dump_program(lambda: b"here", "program")
        for _ in range(rounds + 1):
            start = time.perf_counter()
            try:
                plan = LaunchPlan(new_run_id(), 2, 2, "multi_worker_mirrored", results="all")
                assert launcher.launch(program, plan, lambda _event: None) == [b"here", b"here"]
            except (TfdistError, AssertionError) as error:
                failures.append(str(error).partition("\n")[0])
            seconds.append(time.perf_counter() - start)
    first, *later = seconds
    middle, slowest = statistics.median(later), max(later)
    print(f"first {first:.1f} s; then {len(later)} rounds: median {middle:.2f} s, slowest {slowest:.2f} s")
    print("\n".join([f"{len(failures)} failures", *failures]))


if __name__ == "__main__":
    main()
