def compute_score(a, b, c)
    return 1.0
