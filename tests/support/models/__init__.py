"""Model families, tiny models, and the updates and samples they give."""
