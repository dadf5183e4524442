"""Optional, before stage 1: the assistant turns of conversations, generated anew by the target."""
