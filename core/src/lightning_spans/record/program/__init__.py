"""What a program states itself, in plain code or where no framework does: its agents, its tools, its rewards."""
