"""What a process died of, in words."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tfdist.launch.signals import describe_end, more_memory


@pytest.mark.parametrize(
    ("status", "output", "name", "text"),
    [
        (-9, [], "SIGKILL", "it held 3,210 MiB when last looked at. Raise spark.executor.memoryOverhead"),
        (137, [], "SIGKILL", "(exit status 137); the kernel does this when memory runs out"),
        (-11, [], "SIGSEGV", "ended by SIGSEGV, a crash of native code"),
        (-6, ["Fatal Python error: Aborted"], "SIGABRT", "ended by SIGABRT, a crash of native code"),
        (-6, ["terminate called", "what():  std::bad_alloc"], "SIGABRT", "memory ran out. Raise spark.executor"),
        (-15, [], "SIGTERM", "ended by SIGTERM"),
        (3, [], "SystemExit", "exit status 3 before the train function returned"),
    ],
)
def test_the_end_of_a_process_is_told_with_its_signal_and_what_to_do(
    status: int, output: list[str], name: str, text: str
) -> None:
    """Signals have names, memory that ran out has a setting, a plain exit has its status."""
    found, message = describe_end(status, output, on_spark=True, rss_mib=3210.4)
    assert found == name
    assert text in message


def test_without_spark_no_setting_of_spark_is_named() -> None:
    """On one host the advice is fewer workers or smaller batches."""
    assert "spark" not in describe_end(-9, [], on_spark=False, rss_mib=None)[1]


def test_under_a_limit_of_spark_that_limit_is_named() -> None:
    """A process whose address space Spark has limited is told to raise spark.executor.pyspark.memory."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, "the tests run under a limit"
    assert "memoryOverhead" in more_memory(on_spark=True)
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32));"
        "from tfdist.launch.signals import more_memory; print(more_memory(on_spark=True))"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=True)
    assert "spark.executor.pyspark.memory" in done.stdout
