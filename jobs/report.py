"""What a job shows besides its training: the phases, the training curve, and the summary at the end."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfdist.train.console import workers_text

from .result import JobResult

_NAMES = {
    "auc": "AUC",
    "log_loss": "log loss",
    "class_prior": "class prior",
    "logistic_regression": "logistic regression",
}
_TRAIN, _VALIDATION = "#4878a8", "#d9822b"


def say(console: Console, text: str) -> None:
    """Say which phase begins now."""
    console.print(f"[bold]{escape(text)}[/bold]", soft_wrap=True, highlight=False)


def training_curve(history: Mapping[str, Sequence[float]], name: str) -> Any:
    """A figure with one panel per metric: training and validation over the epochs.

    Args:
        history: name -> value per epoch; ``val_<name>`` is the validation curve of ``<name>``.
        name: of the job, for the title.

    Returns:
        A ``matplotlib.figure.Figure``.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics = [metric for metric in history if not metric.startswith("val_")]
    figure = Figure(figsize=(5.2 * len(metrics), 4.0), dpi=130, layout="constrained")
    figure.suptitle(f"{name}: training", fontsize=13, fontweight="bold")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        curves = {"train": (metric, _TRAIN), "validation": (f"val_{metric}", _VALIDATION)}
        for label, (key, color) in curves.items():
            if key in history:
                epochs = range(1, len(history[key]) + 1)
                axes.plot(epochs, history[key], label=label, color=color, marker="o", markersize=4, linewidth=1.8)
        axes.set_xlabel("epoch")
        axes.set_ylabel(_NAMES.get(metric, metric))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    return figure


def summary(result: JobResult, console: Console) -> None:
    """Print the outcome of a job: quality beside the baselines, rows, seconds, and where things are."""
    quality = Table(title=f"{result.name}: quality on {result.rows['test']:,} test rows", title_justify="left")
    quality.add_column("predictor")
    for metric in result.test:
        quality.add_column(_NAMES.get(metric, metric), justify="right")
    quality.add_row("[bold]model[/bold]", *[f"[bold]{_number(value)}[/bold]" for value in result.test.values()])
    for name, values in result.baselines.items():
        quality.add_row(_NAMES.get(name, name), *[_number(values[metric]) for metric in result.test])
    seconds = Table(title="seconds by phase", title_justify="left")
    for phase in result.seconds:
        seconds.add_column(phase, justify="right")
    seconds.add_row(*[f"{value:.1f}" for value in result.seconds.values()])
    rows = ", ".join(f"{count:,} {part}" for part, count in result.rows.items())
    workers = ", ".join(f"{worker['rank']} on {worker['host']}" for worker in result.workers)
    launches = result.world_sizes
    again = f"; launched {len(launches)} times, with {workers_text(launches)}" if len(launches) > 1 else ""
    dropped = f"; {result.dropped_rows:,} left out of each epoch" if result.dropped_rows else ""
    facts = {
        "rows": f"{rows}{dropped}; trained at {result.rows_per_s:,.0f} rows/s",
        "workers": f"{workers}{again}",
        "model": str(result.model_path),
        "figure": str(result.figure_path),
        "run": f"{result.run_id} in experiment {result.experiment}",
        "see it": ui_command(result.tracking_uri),
    }
    console.print()
    console.print(quality)
    console.print(seconds)
    for name, text in facts.items():
        # Soft: a path or a command that is broken into lines cannot be copied.
        console.print(f"[bold]{name:<9}[/bold]{escape(text)}", soft_wrap=True)


def ui_command(tracking_uri: str) -> str:
    """What to type, or where to go, to see the run."""
    if tracking_uri.startswith(("http://", "https://")):
        return tracking_uri
    if tracking_uri == "databricks":
        return "the experiment's page in the Databricks workspace"
    return f"{_command('mlflow')} ui --backend-store-uri {tracking_uri}"


def _command(name: str) -> str:
    """A command of this environment as it can be typed here, also where the environment is not activated."""
    path = Path(sys.prefix, "bin", name)
    if not path.is_file():
        return name
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)
