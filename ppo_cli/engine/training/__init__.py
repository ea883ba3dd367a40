"""Optimizer steps of actor and critic."""
