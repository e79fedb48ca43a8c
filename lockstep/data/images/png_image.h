// SPDX-License-Identifier: Apache-2.0
// data/images/png_image.h: PNG through libpng; see data/images/encoded_image.h.
#pragma once

#include "lockstep/data/images/encoded_image.h"

namespace lockstep {

ImageShape png_shape(std::span<const std::uint8_t> file);
ImageView decode_png(std::span<const std::uint8_t> file, DecodeScratch& scratch);  // the whole image

}  // namespace lockstep
