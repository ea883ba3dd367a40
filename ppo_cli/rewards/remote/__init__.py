"""What judges and served reward models share: limits and the event-loop thread."""
