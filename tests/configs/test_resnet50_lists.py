"""The list of ResNet-50 that Tuna ships holds the layers of the published network."""

from __future__ import annotations

from collections import Counter
from importlib.resources import as_file, files

from tuna.configs import ConvConfig, DataType, Direction, ParsedFile, parse_file


def _shipped(name: str) -> ParsedFile:
    with as_file(files("tuna.example") / name) as path:
        return parse_file(path)


def _layers_in_order() -> list[tuple[int, int, int, int, int]]:
    """(input channels, size, output channels, filter, stride) of every convolution, walked from the
    architecture."""
    layers, channels, size = [(3, 224, 64, 7, 2)], 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and width != 64 else 1
            layers += [(channels, size, width, 1, 1), (width, size, width, 3, stride)]
            layers.append((width, size // stride, 4 * width, 1, 1))
            if block == 0:
                layers.append((channels, size, 4 * width, 1, stride))
            channels, size = 4 * width, size // stride
    return layers


def _layer(config: ConvConfig) -> tuple[int, int, int, int, int]:
    return config.in_channels, config.in_h, config.out_channels, config.fil_h, config.conv_stride_h


def test_the_list_has_every_convolution_of_the_network_as_often_as_it_occurs() -> None:
    parsed = _shipped("resnet50_b1.txt")
    assert not parsed.rejections
    assert parsed.counts.expanded == 0
    layers = [_layer(config) for config in parsed.configs if isinstance(config, ConvConfig)]
    assert dict(zip(layers, parsed.weights, strict=True)) == Counter(_layers_in_order())
    assert (len(layers), sum(parsed.weights)) == (23, 53)


def test_every_layer_is_square_same_padded_forward_batch_1_and_fp32() -> None:
    for config in _shipped("resnet50_b1.txt").configs:
        assert isinstance(config, ConvConfig)
        assert (config.in_w, config.fil_w, config.conv_stride_w) == (
            config.in_h,
            config.fil_h,
            config.conv_stride_h,
        )
        assert config.pad_h == config.pad_w == config.fil_h // 2
        assert config.output_size == (config.in_h // config.conv_stride_h,) * 2
        assert (config.batchsize, config.direction, config.data_type) == (
            1,
            Direction.FORWARD,
            DataType.FP32,
        )


def test_the_whole_network_has_the_published_number_of_multiply_adds() -> None:
    work = {
        _layer(config): config.flops
        for config in _shipped("resnet50_b1.txt").configs
        if isinstance(config, ConvConfig)
    }
    # torchvision states 4.089 G multiply-adds with the last fully connected layer, which has 2048 x
    # 1000.
    assert sum(work[layer] for layer in _layers_in_order()) // 2 + 2048 * 1000 == 4_089_184_256
