"""Stage 4: evaluation of heads."""

import mtptrain  # noqa: F401  # sets the environment, before torch is loaded
