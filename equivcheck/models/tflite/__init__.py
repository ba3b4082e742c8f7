"""TFLite models: reading the flatbuffer, its meaning as a QDQ ONNX model, and cutting it."""
