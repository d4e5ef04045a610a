"""What users call a folder: paths and URLs, as tfdist and as Spark open them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from tfdist.data.storage import URL, Storage
from tfdist.errors import ConfigError

DBFS_MOUNT = Path("/dbfs")
"""Where Databricks mounts ``dbfs:/`` on each machine."""

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), "adlfs"),
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
_HADOOP_SCHEMES = {"s3": "s3a", "gcs": "gs"}


def open_storage(place: str | Path, options: Mapping[str, Any] | None = None, where: str = "path") -> Storage:
    """A folder or file by what a user calls it.

    Args:
        place: a path or a URL; ``file:/x`` is the path ``/x``, and so is ``dbfs:/x`` the path ``/dbfs/x`` where
            Databricks mounts it.
        options: what fsspec needs to open the URL.
        where: name of the argument, for messages.

    Raises:
        ConfigError: there is no such file system, its package is not installed, or the URL holds a secret.
    """
    if not isinstance(place, str | Path):
        raise ConfigError(f"{where}: expected a path or a URL, got {type(place).__qualname__}")
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"storage_options: expected a dict, got {type(options).__qualname__}")
    text = str(place)
    scheme = found[1] if (found := URL.match(text)) else ""
    if scheme == "dbfs" and DBFS_MOUNT.is_dir():
        return Storage(str(DBFS_MOUNT / text.partition(":")[2].lstrip("/")))
    if scheme in ("", "file"):
        return Storage(str(Path(re.sub(r"^file:/+", "/", text)).absolute()))
    parts = [urlsplit(part) for part in text.split("::")]
    if any(part.password or part.query for part in parts):
        raise ConfigError(
            f"{where}: expected a {scheme} URL without a password or a query, which may be secrets that messages would "
            "show; give them by storage_options"
        )
    text = re.sub(r"^(\w+):/(?!/)", r"\1:///", text).rstrip("/")
    opened = Storage(f"{text}//" if text.endswith(":") else text, dict(options or {}))
    try:
        fsspec.url_to_fs(opened.url, **opened.options)
    except Exception as error:  # noqa: BLE001  each file system has its own
        known = scheme in fsspec.available_protocols()
        package = None if "::" in text else _PACKAGES.get(scheme)
        if isinstance(error, ImportError) or (package and not known):
            remedy = f"pip install {package}" if package else str(error)
            problem = f"{scheme} URLs need a package that is not installed here; {remedy}"
        elif known:
            problem = f"expected in storage_options what opens {scheme} URLs, got {opened.without_secrets(error)}"
        else:
            problem = (
                f"expected a path, or a URL of a file system that fsspec knows, got {scheme}; install the package that "
                "adds it to fsspec, or mount it"
            )
        raise ConfigError(f"{where}: {problem}") from None
    return opened


def hadoop_url(storage: Storage) -> str:
    """A folder as Spark names it.

    Raises:
        ConfigError: Spark has no name for it.
    """
    if storage.is_local:
        return storage.local.as_uri()
    scheme, _, rest = storage.url.partition("://")
    container, _, path = rest.partition("/")
    if scheme not in ("az", "abfs", "abfss") or "@" in container:
        return f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{rest}"
    account = storage.options.get("account_name")
    if not account:
        raise ConfigError(
            "cache_dir: expected 'abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER', by which Spark finds it too, "
            f"got {storage.url!r}"
        )
    return f"abfss://{container}@{account}.dfs.core.windows.net/{path}"


def default_cache_dir() -> Path:
    """``$TFDIST_CACHE_DIR``, or ``~/.cache/tfdist``."""
    return Path(os.environ.get("TFDIST_CACHE_DIR") or Path.home() / ".cache" / "tfdist").absolute()


def make_folder(folder: Path, where: str) -> None:
    """Make a folder that files will be written to, and those above it.

    Args:
        folder: need not exist.
        where: name of the setting that names it, for messages.

    Raises:
        ConfigError: it cannot be made, or nothing may be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{where}: expected a folder that can be made, got {folder}: {error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: expected a folder that can be written to, got {folder}; choose another")
