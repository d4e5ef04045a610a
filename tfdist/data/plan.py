"""Whether a DataFrame means the same rows as one before: its plan and its source files as text."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PLANS = frozenset(
    {"Aggregate", "Deduplicate", "Distinct", "Except", "Expand", "Filter", "Generate", "GlobalLimit", "Intersect"}
    | {"Join", "LocalLimit", "LogicalRelation", "Offset", "OneRowRelation", "Project", "Range", "Repartition"}
    | {"RepartitionByExpression", "ResolvedHint", "Sort", "SubqueryAlias", "Union", "View", "Window"}
)
_LEAVES = frozenset({"LogicalRelation", "OneRowRelation", "Range"})
_CATALYST = "org.apache.spark.sql.catalyst."
_UNKNOWABLE = re.compile(
    r"Python|Scala|UDF|UDAF|Aggregator|Invoke|NewInstance|Subquery|Hive|Lambda(?!Function|Variable)"
)
_ALL_FIELDS = 2**31 - 1
_CLASS = re.compile(r'"class":"([A-Za-z0-9_.$]+)"')
_SESSION_IDS = re.compile(r'"jvmId":"[^"]*"|#\d+L?|plan_id=\d+')


def plan_text(df: DataFrame) -> str | None:
    """What a frame computes, as text that is equal for equal plans; None when that cannot be known.

    None for rows that lie in the driver or an RDD, cached frames, functions of the user's, random values, subqueries
    and Spark Connect, whose client does not see the plan.
    """
    frame = getattr(df, "_jdf", None)
    if frame is None:
        return None
    execution = frame.queryExecution()
    plan = execution.analyzed()
    if not plan.deterministic() or plan.isStreaming():
        return None
    readers = []
    for leaf in _each(execution.withCachedData().collectLeaves()):
        if _class(leaf) not in _LEAVES:
            return None
        if _class(leaf) == "LogicalRelation":
            relation = leaf.relation()
            if _class(relation) != "HadoopFsRelation":
                return None
            format_name = relation.fileFormat().getClass().getName()
            readers.append(f"{format_name} {relation.options().toString()} {relation.dataSchema().json()}")
    # Optimised too, so that current_date() and the like are values.
    plans = [plan.canonicalized(), execution.optimizedPlan().canonicalized()]
    texts = [p.toJSON() for p in plans]
    if not all(map(_knowable, set(_CLASS.findall("".join(texts))))):
        return None
    # JSON leaves out arguments that the printed form has, such as the kind of a cast.
    texts += [_printed(p) for p in plans]
    conf = df.sparkSession._jsparkSession.conf().getAll()
    settings = sorted(f"{pair._1()}={pair._2()}" for pair in _each(conf.toSeq()))
    settings = [s for s in settings if s.startswith("spark.sql.") and "warehouse" not in s]
    return _SESSION_IDS.sub("", "\n".join([*texts, *readers, *settings, df.sparkSession.version]))


def source_text(df: DataFrame) -> str | None:
    """Path, size and time of change of each file that a frame reads; None when a file is not on a mounted path."""
    lines = []
    for uri in sorted(df.inputFiles()):
        parsed = urlparse(uri)
        if parsed.scheme not in ("", "file"):
            return None
        try:
            stat = Path(unquote(parsed.path)).stat()
        except FileNotFoundError:
            return None
        lines.append(f"{parsed.path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}")
    return "\n".join(lines)


def digest_of(*texts: str | None) -> str:
    """32 hex digits of SHA-256 over the texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text or '')}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def _printed(plan: Any) -> str:
    """All nodes of a plan with all their fields; the usual print leaves out the fields after the 25th."""
    return "\n".join([str(plan.simpleString(_ALL_FIELDS)), *map(_printed, _each(plan.children()))])


def _knowable(name: str) -> bool:
    last = re.split(r"[.$]", name.rstrip("$"))[-1]
    if _UNKNOWABLE.search(last):
        return False
    if ".plans.logical." in name or ".execution." in name:
        return last in _PLANS
    return name.startswith((f"{_CATALYST}expressions.", f"{_CATALYST}plans.", "org.apache.spark.sql.types."))


def _class(java: Any) -> str:
    return str(java.getClass().getSimpleName()).rstrip("$")


def _each(sequence: Any) -> list[Any]:
    return [sequence.apply(i) for i in range(sequence.size())]
