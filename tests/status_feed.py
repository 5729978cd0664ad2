"""The states that `twostroke status` shows, again and again, without the start of a command between two looks.

python status_feed.py HOME CLUSTER       one JSON line a look: {worker id: state}; until it is ended
"""

import json
import os
import sys
import time
from pathlib import Path

from twostroke.cluster.control import lifecycle
from twostroke.cluster.control.context import Context
from twostroke.cluster.control.status_report import report_process

LOOK_S = 0.1

if __name__ == "__main__":
    home, cluster = Path(sys.argv[1]), sys.argv[2]
    record, files = Context(home, home / "models", os.environ).running(cluster)
    with lifecycle.connected(record, files, cluster) as client:
        while True:
            reports = [report_process(view, None) for view in client.status().views]
            print(json.dumps({report.worker_id: report.state for report in reports}), flush=True)
            time.sleep(LOOK_S)
