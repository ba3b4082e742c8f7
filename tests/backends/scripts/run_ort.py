"""Ten lines make any board a backend; this one is ONNX Runtime, so that its figures are known."""

import onnxruntime


def run(model_path, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model_path, options, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds)))
