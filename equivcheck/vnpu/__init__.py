"""The virtual NPU: int8 models on real engines' integer arithmetic, with the placement of a real NPU."""
