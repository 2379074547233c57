"""What a run reports to people: metrics, alarms, progress. Only reads, and makes no decisions."""
