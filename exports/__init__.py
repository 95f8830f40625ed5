"""A study's tables, written for the tools of others: TensorBoard, Optuna's dashboard."""
