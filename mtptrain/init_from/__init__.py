"""Gives a head its initial weights: those of a published head or of another run, or with `from_target` the target's.

`published` finds out what a directory holds, `readers` read each kind of head, and `start` checks that it is the head
of the config. A head that would draft otherwise than it was trained to is refused with a UserError. Nothing here writes
an export, and nothing that does is imported.
"""
