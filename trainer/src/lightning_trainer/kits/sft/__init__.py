"""Learning from data: conversations, preference pairs, a teacher. The data comes from files or stores."""
