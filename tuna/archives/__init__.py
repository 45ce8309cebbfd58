"""Sessions as a whole: what they take, their archives, and their end."""
