// data/images/encoded_image.h: decodes JPEG (libjpeg-turbo) and PNG (libpng): of a JPEG only the part that is needed, and as
// small as the result allows.
//
// Threads: a DecodeScratch belongs to one thread
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lockstep/images.h"

namespace lockstep {

constexpr std::int64_t kMostPixels = std::int64_t{1} << 26;  // of an encoded image; a larger one is refused

using DecodeScratch = std::vector<std::uint8_t>;  // pixels of the image decoded last

bool is_jpeg(std::span<const std::uint8_t> file);
bool is_png(std::span<const std::uint8_t> file);

// The shape after decoding to RGB, from the header alone. Throws DataError with `origin`: neither JPEG nor PNG, a
// damaged header, more than kMostPixels.
ImageShape encoded_shape(std::span<const std::uint8_t> file, const std::string& origin);

// The part of the image that placement.box covers, interleaved RGB in `scratch`. Counts the box anew in what is
// returned: a JPEG may come out at 1/2, 1/4 or 1/8, never smaller than the result. Throws DataError (without a place):
// damaged or cut in the part that was read.
ImageView decode_image(std::span<const std::uint8_t> file, Placement& placement, DecodeScratch& scratch);

}  // namespace lockstep
