"""ONNX Runtime without optimisation: an engine that truncating a model, or asking for more outputs, does not change."""

import onnxruntime


def run(model_path, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model_path, options).run(None, feeds)
