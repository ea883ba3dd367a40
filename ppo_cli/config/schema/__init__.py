"""The declarations of all settings, the table made from them, and how raw values are read."""
