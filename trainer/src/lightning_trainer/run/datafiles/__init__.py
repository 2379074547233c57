"""Reading data files row by row, for tasks and conversations alike; documented in docs/reference/json.md."""
