"""Twins: a quantised ONNX model written as a .tflite with identical integers, scales and zero points.

`convert` translates the integer IR of every step (equivcheck.vnpu.ir); `prove` runs the result on TFLite's reference kernels.
"""
