"""What a program says of itself, in plain code or where no framework says it: its agents, its tools, its rewards."""
