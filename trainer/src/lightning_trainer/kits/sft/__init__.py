"""Learning from data: conversations, preference pairs, a teacher. What acts here comes from files or from stores."""
