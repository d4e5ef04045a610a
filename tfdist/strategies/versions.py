"""The versions of Keras for which training over several replicas was shown to be right; pure, for the driver too."""

from __future__ import annotations

import re

from tfdist.errors import UnsupportedVersionError

Version = tuple[int, int]

OLDEST: Version = (3, 12)
NEWEST: Version = (3, 15)


def check_keras_version(version: str) -> Version:
    """Refuse a Keras for which training over several replicas was never shown to be right.

    Args:
        version: as in ``keras.__version__``.

    Returns:
        Its major and minor number.

    Raises:
        UnsupportedVersionError: it is out of the tested range.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    if number is None or not OLDEST <= number <= NEWEST:
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise UnsupportedVersionError(
            f"keras: expected version {oldest} to {newest} for training with several replicas, got {version}; install "
            f"'keras>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}', or train with strategy 'single'"
        )
    return number
