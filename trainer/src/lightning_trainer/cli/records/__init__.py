"""Commands that read what was recorded: shown, compared, exported, done again, deleted."""
