"""The checks that `eval.gpu_check` runs on a machine."""
