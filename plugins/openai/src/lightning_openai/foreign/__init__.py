"""Calls in vendors' own formats (Gemini's, Ollama's, Cohere's): recorded and answered as chat completions."""
