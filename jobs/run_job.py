"""What spark-submit runs: ``spark-submit ... jobs/run_job.py JOB.yaml [--set a.b=c]``; as ``tfdist run`` otherwise.

The session is the one that spark-submit describes: its master and its settings win over those of the job file.
"""

from __future__ import annotations

import sys

from tfdist_jobs.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    main()
