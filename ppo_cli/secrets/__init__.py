"""No key leaves: known values and strings like keys are removed where a line is written."""
