"""What several test files use: fakes, servers, models, runs and conversations."""
