"""Reading data files row by row, for tasks and for conversations alike: docs/reference/json.md says how."""
