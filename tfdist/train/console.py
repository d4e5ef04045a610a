"""What a training shows on the driver when the caller asks for nothing else: plain lines."""

from __future__ import annotations

import sys

from tfdist.launch.protocol import Event


def describe(event: Event) -> str | None:
    """One line for an event, or None for one that is not shown."""
    match event["kind"]:
        case "waiting":
            return f"waiting for the cluster: {event['ready']}/{event['wanted']} slots"
        case "line":
            return f"[{event['rank']}] {event['text']}"
        case "epoch":
            logs = "  ".join(f"{name} {value:.4f}" for name, value in event["logs"].items())
            head = f"epoch {event['epoch'] + 1}/{event['epochs']}"
            return f"{head}  {logs}  {event['rows_per_s']:,.0f} rows/s  {event['seconds']:.1f} s"
        case "restart":
            place = f"from epoch {event['epoch'] + 1}, step {event['step']}"
            return f"restart {event['attempt']} of {event['of']} {place}: {event['cause']}"
        case "checkpoint-failed":
            return f"warning: no checkpoint of step {event['step']}, the one before stays: {event['error']}"
    return None


def print_event(event: Event) -> None:
    """Write the line of an event to standard output."""
    text = describe(event)
    if text is not None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
