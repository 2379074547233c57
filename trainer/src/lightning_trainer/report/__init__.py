"""What a run tells people: metrics, alarms, progress. Reads and never decides."""
