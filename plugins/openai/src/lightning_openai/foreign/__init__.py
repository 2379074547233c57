"""Calls of models in vendors' own forms (Gemini's, Ollama's, Cohere's): recorded and asked as chat completions."""
