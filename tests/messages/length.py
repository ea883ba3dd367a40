def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return min(1.0, len(solution_str) / 200)
