"""The recorded data: frozen records, and their one JSON form. Imports nothing else of ours."""
