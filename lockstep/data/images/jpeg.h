// SPDX-License-Identifier: Apache-2.0
// data/images/jpeg.h: JPEG through libjpeg-turbo; see data/images/encoded_image.h.
#pragma once

#include "lockstep/data/images/encoded_image.h"

namespace lockstep {

ImageShape jpeg_shape(std::span<const std::uint8_t> file);
ImageView decode_jpeg(std::span<const std::uint8_t> file, Placement& placement, DecodeScratch& scratch);

// pixels: height x width x 3, RGB. For tests, benchmarks and lockstep data pack. Throws DataError.
std::vector<std::uint8_t> encode_jpeg(const std::uint8_t* pixels, std::int64_t height, std::int64_t width, int quality);

}  // namespace lockstep
