"""Lists the slow tests: `make test` leaves them out, `make test-slow` runs those without engines, `make test-all` all.

Each entry is a pattern of test ids. A test is slow if a pattern matches the start of its id. The comment above an
entry names the behaviour that its tests cover and, after "Kept", the tests of this behaviour that `make test` runs.
"""

import re

SLOW = {
    # Slurm jobs on a cluster of daemons, which takes minutes. Kept: the scripts, and addresses and disks of nodes.
    r"tests/slurm/test_(pipeline|lost_nodes)\.py",
}


def is_slow(test_id: str) -> bool:
    return any(re.match(pattern, test_id) for pattern in SLOW)
