"""The frozen target: its source, the supported model families, its frozen parts, and the whole model.

Files, configs and models that cannot be used are refused with a UserError, which names them and what to do.
"""
