"""Defines the error for a row of somebody's data that is left out, with the reason."""


class ConversationRefused(ValueError):
    """Raised for a row that must be left out. Its message is the reason shown in the report."""
