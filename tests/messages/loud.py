def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 40.0 * len(solution_str)
