"""The draft and verify path, and how acceptance is measured with it."""
