compute_score = 3
