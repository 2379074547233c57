"""Model calls through httpx, which other clients use too, and the httpx clients themselves."""
