"""The command ``tfdist``."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

import tfdist
from tfdist.environ import adopt
from tfdist.errors import ConfigError, DataError, TfdistError, UnsupportedVersionError, WorkerError

from .interruption import interrupt_on_sigterm, was_interrupted
from .spec import JobSpec

if TYPE_CHECKING:
    from tfdist.data.elements import Element

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_INTERRUPTED = "interrupted; the workers were ended"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train TensorFlow / Keras 3 models on Apache Spark.",
    epilog="Exit code: 0 done, 1 the run failed or the check found problems, 2 the job or the command is wrong, 130 "
    "interrupted.",
)

Job = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting of the file; the value is YAML. Repeatable."),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of an error.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with this job where an earlier process was stopped.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"tfdist {tfdist.__version__}")
        raise typer.Exit


@app.command()
def run(job: Job, overrides: Overrides = None, resume: Resume = False, traceback: Traceback = False) -> None:
    """Run a job: prepare the rows, train, track, score, and print a summary."""
    with _errors_as_sentences(traceback):
        spec = JobSpec.from_yaml(job, overrides or ())
        from .runner import run_job

        run_job(spec, resume=resume)


@app.command()
def check(job: Job, overrides: Overrides = None, traceback: Traceback = False) -> None:
    """Check a job without training: spec, hosts, versions, folders, source, columns, types and nulls.

    All problems come at once, each with what to change; with any the exit code is 1.
    """
    with _errors_as_sentences(traceback, bad_input=FAILED):
        spec = JobSpec.from_yaml(job, overrides or ())
        from .checks import check_job
        from .cluster import described
        from .session import job_session

        with job_session(spec.spark, spec.name) as spark:
            found = check_job(spec, spark)
        console = Console()
        if found.cluster.driver is not None:
            hosts = (found.cluster.driver, *found.cluster.workers)
            _print_hosts(console, [described(host, spec.compute.gpu_resource_name) for host in hosts], spec.name)
        if found.elements:
            _print_elements(console, found.elements, f"{spec.name}: the training and validation data")
        for note in found.cluster.notes:
            console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
        if found.problems:
            count = len(found.problems)
            console.print(f"[red]{spec.name}: {count} {'problem' if count == 1 else 'problems'}[/red]", soft_wrap=True)
            raise ConfigError(found.problems)
        console.print(f"[green]{spec.name}: no problem found[/green]")


data = typer.Typer(no_args_is_help=True, help="The data sets that from_dataframe wrote and keeps for the next use.")
app.add_typer(data, name="data")
CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir", help="Their folder or URL; by default $TFDIST_CACHE_DIR or ~/.cache/tfdist.", show_default=False
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A name of the list, or its beginning.", show_default=False)]


@data.command("list")
def list_data(cache_dir: CacheDir = None) -> None:
    """List the data sets, the last used first."""
    from tfdist.data.cache import cached_data

    with _errors_as_sentences(False):
        found = cached_data(cache_dir)
    table = Table()
    for heading in ("name", "rows", "size", "last used", "kept until"):
        table.add_column(heading, justify="right" if heading in ("rows", "size") else "left", overflow="fold")
    for one in found:
        rows = "unfinished" if one.manifest is None else f"{one.manifest.rows:,}"
        table.add_row(escape(one.name), rows, decimal(one.size_bytes), _day(one.used_at), _day(one.expires_at))
    console = Console()
    console.print(table if found else "no data sets")


@data.command("show")
def show_data(name: Name, cache_dir: CacheDir = None) -> None:
    """Show a data set: its place, rows and columns."""
    from tfdist.data.cache import find_data
    from tfdist.data.elements import elements

    with _errors_as_sentences(False):
        one = find_data(name, cache_dir)
    console = Console()
    console.print(f"{one.path}\n{decimal(one.size_bytes)}, last used {_day(one.used_at)}", markup=False, soft_wrap=True)
    if one.manifest is None:
        console.print("unfinished: left by a writer that was cut off, or still being written")
        return
    console.print(f"{one.manifest.rows:,} rows, {one.manifest.dropped_rows:,} left out for nulls")
    _print_elements(console, elements(one.manifest.schema, one.manifest.null_counts))


@data.command("delete")
def delete_data(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A name of the list, or its beginning.")] = None,
    cache_dir: CacheDir = None,
    expired: Annotated[bool, typer.Option("--expired", help="All whose time to live is over.")] = False,
) -> None:
    """Delete a data set, or all whose time is over."""
    from tfdist.data.cache import delete_data, delete_expired

    with _errors_as_sentences(False):
        if (name is None) is not expired:
            raise ConfigError("expected NAME or --expired")
        gone = delete_expired(cache_dir) if name is None else [delete_data(name, cache_dir)]
    for one in gone:
        typer.echo(f"deleted {one.name}, {decimal(one.size_bytes)}")
    if not gone:
        typer.echo("nothing is over its time")


def _print_elements(console: Console, found: Sequence[Element], title: str | None = None) -> None:
    """The element spec as a table, a line each; only a terminal is as wide as it is."""
    table = Table(title=title, title_justify="left")
    for heading in ("column", "Spark type", "tensor of a row", "nulls", "policy"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "nulls" else "left")
    for line in found:
        table.add_row(*map(escape, (line.column, line.spark_type, line.tensor, line.nulls, line.policy)))
    _print_table(console, table)


def _print_hosts(console: Console, hosts: Sequence[Mapping[str, str]], name: str) -> None:
    """The driver and the slots, a line each."""
    table = Table(title=f"{name}: the driver and the slots", title_justify="left")
    for heading in hosts[0]:
        table.add_column(heading, overflow="fold")
    for host in hosts:
        table.add_row(*map(escape, host.values()))
    _print_table(console, table)


def _print_table(console: Console, table: Table) -> None:
    if not console.is_terminal:
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=1000)).maximum
        )
    console.print(table)


def _day(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def main() -> None:
    """The console entry."""
    # TensorFlow writes pages about the processor to standard error, in this process and in the workers.
    adopt({name: os.environ.get(name, value) for name, value in {"TF_CPP_MIN_LOG_LEVEL": "2"}.items()})
    interrupt_on_sigterm()
    app(prog_name="tfdist")


@contextmanager
def _errors_as_sentences(show_traceback: bool, bad_input: int = BAD_INPUT) -> Iterator[None]:
    """Turn an error into text on standard error and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        _complain(_INTERRUPTED, show_traceback)
        raise typer.Exit(INTERRUPTED) from None
    except (ConfigError, DataError, UnsupportedVersionError) as error:
        _complain(str(error), show_traceback)
        raise typer.Exit(bad_input) from None
    except WorkerError as error:
        if show_traceback and error.worker_traceback:
            sys.stderr.write(error.worker_traceback)
        _complain(str(error), show_traceback)
        raise typer.Exit(FAILED) from None
    except TfdistError as error:
        _complain(str(error), show_traceback)
        raise typer.Exit(FAILED) from None
    except Exception as error:  # noqa: BLE001  the last stop: reported, and an exit code
        if was_interrupted(error):
            _complain(_INTERRUPTED, show_traceback)
            raise typer.Exit(INTERRUPTED) from None
        _complain(f"{type(error).__name__}: {error}\n(run again with --traceback to see where)", show_traceback)
        raise typer.Exit(FAILED) from None


def _complain(text: str, show_traceback: bool) -> None:
    if show_traceback:
        traceback.print_exc()
    sys.stderr.write("".join(f"tfdist: {line}\n" for line in text.splitlines()))


if __name__ == "__main__":
    main()
