// SPDX-License-Identifier: Apache-2.0
// data/images/image_view.h: pixels in memory, and which part of them becomes a sample.
//
// Threads: values
#pragma once

#include <cstddef>
#include <cstdint>

#include "lockstep/images.h"

namespace lockstep {

// Bytes of pixels that somebody else owns. Planar (C, H, W): pixel_stride 1; interleaved RGB (H, W, 3): pixel_stride 3.
struct ImageView {
  const std::uint8_t* pixels = nullptr;
  ImageShape shape;
  std::ptrdiff_t channel_stride = 0;
  std::ptrdiff_t row_stride = 0;
  std::ptrdiff_t pixel_stride = 0;
};

inline ImageView planar(const std::uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, shape.height * shape.width, shape.width, 1};
}
inline ImageView interleaved(const std::uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, 1, shape.width * 3, 3};
}

// A part of an image in pixels, from its upper left corner. It may reach beyond the edges, where pixels are zero.
struct Box {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;
};

// How a sample is made: `box`, resized to height x width, then mirrored if `flip`.
struct Placement {
  Box box;
  std::int64_t height = 0;
  std::int64_t width = 0;
  bool flip = false;

  // Every pixel of the box is a pixel of the result: nothing has to be interpolated.
  bool is_copy() const {
    return box.width == static_cast<double>(width) && box.height == static_cast<double>(height) &&
           box.left == static_cast<double>(static_cast<std::int64_t>(box.left)) &&
           box.top == static_cast<double>(static_cast<std::int64_t>(box.top));
  }
};

// Byte value v of channel c becomes v * scale[c] + shift[c].
struct Normalisation {
  static constexpr std::int64_t kMaxChannels = 4;
  float scale[kMaxChannels] = {1, 1, 1, 1};
  float shift[kMaxChannels] = {};
};

}  // namespace lockstep
