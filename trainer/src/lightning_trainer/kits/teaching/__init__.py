"""Teachers of on-policy distillation, which give the probabilities of a student's actual and possible tokens."""
