"""Optional, before stage 1: regenerates the assistant turns of conversations with the target."""
