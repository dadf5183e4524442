"""The checks that `mtptrain gpu-check` runs on a machine."""
