def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    return {"score": bonus, "style": 2.0}
