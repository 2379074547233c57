"""Options that several commands share, declared once with their help text and completion."""
