"""Run DAGs with Airflow, by the name of their variable in dags/reports.py, as that of one date: each time the same run.

Airflow's Python runs this, in which neither the tests nor Spark are installed.
"""

import os
import sys
from datetime import UTC, datetime

sys.path.insert(0, os.environ["AIRFLOW__CORE__DAGS_FOLDER"])

import reports

DATE = datetime(2026, 11, 20, tzinfo=UTC)

for name in sys.argv[1:]:
    run = getattr(reports, name).test(run_after=DATE, logical_date=DATE)
    states = ", ".join(sorted(f"{each.task_id} {each.state}" for each in run.get_task_instances()))
    print(f"RUN {name}: {states}", flush=True)  # noqa: T201 - the test reads it
