"""What talks to an engine. Each file stands alone (stdlib, numpy, that engine; Python 3.8 clean), so that it can travel.

An engine is a class with

* `info() -> dict`: name, version, what it runs on;
* `load(model: bytes, options) -> {"inputs": [(name, type, shape)], "outputs": [...]}`;
* `run(feeds, outputs=None) -> {name: array}`;
* `close()`;
* `optimise(model: bytes, options) -> bytes`, where the engine can show its own graph (ONNX Runtime).
"""
