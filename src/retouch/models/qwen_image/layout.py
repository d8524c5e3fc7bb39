"""Latents of the Qwen-Image family, whose autoencoder is a video model; an image is one frame after two frames of zeros.

In its causal convolutions, all temporal taps except the last are multiplied with these zeros. So for an image, the last tap alone
gives the same numbers up to rounding, with a third of the work, or even less if the 3D kernels are slow.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor, nn

from retouch.models.common.latents import FrameLatents


class QwenLatents(FrameLatents):
    """Converts images to packed latents and back; each channel is normalised. Afterwards, ``vae`` accepts single frames only."""

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        use_last_temporal_tap(vae)
        super().__init__(vae)

    @staticmethod
    def geometry(config: Mapping[str, Any]) -> tuple[int, int]:
        return config["z_dim"], 2 ** len(config["temperal_downsample"])


def use_last_temporal_tap(vae: nn.Module) -> None:
    """Make every causal convolution of ``vae`` compute only its last temporal tap. Inputs must then be (b, c, 1, h, w)."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d) and module.stride[0] == 1:
            module.forward = _LastTap(module)


class _LastTap:
    def __init__(self, convolution: QwenImageCausalConv3d) -> None:
        self.convolution = convolution

    def __call__(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        convolution = self.convolution
        assert x.shape[2] == 1, "only single frames are supported, not videos"
        width, height = convolution._padding[0], convolution._padding[2]
        weight = convolution.weight[:, :, -1]
        return F.conv2d(x.squeeze(2), weight, convolution.bias, stride=convolution.stride[1:], padding=(height, width)).unsqueeze(2)
