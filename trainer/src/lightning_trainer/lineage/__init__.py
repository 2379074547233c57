"""What a checkpoint learned from: written step by step while it learns, found again from either end."""
