// SPDX-License-Identifier: Apache-2.0
// data/images/image_kernels.h: pixels in memory, which part of them becomes a sample, and the loops that make its floats
// (C, H, W) in one pass over each pixel.
//
// Threads: no state but scratch memory of the calling thread
#pragma once

#include <cmath>

#include "lockstep/images.h"

namespace lockstep {

// Bytes of pixels that somebody else owns. Planar (C, H, W): pixel_stride 1; interleaved RGB (H, W, 3): pixel_stride 3.
struct ImageView {
  const uint8_t* pixels = nullptr;
  ImageShape shape;
  ptrdiff_t channel_stride = 0;
  ptrdiff_t row_stride = 0;
  ptrdiff_t pixel_stride = 0;
};

inline ImageView planar(const uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, shape.height * shape.width, shape.width, 1};
}
inline ImageView interleaved(const uint8_t* pixels, const ImageShape& shape) {
  return {pixels, shape, 1, shape.width * 3, 3};
}

// A part of an image in pixels, from its upper left corner. It may reach beyond the edges, where pixels are zero.
struct Box {
  double left = 0;
  double top = 0;
  double width = 0;
  double height = 0;
};

inline Box whole_image(const ImageShape& shape) {
  return {0, 0, static_cast<double>(shape.width), static_cast<double>(shape.height)};
}

// Makes a sample of `box`, resized to height x width, then mirrored if `flip`.
struct Placement {
  Box box;
  int64_t height = 0;
  int64_t width = 0;
  bool flip = false;

  // Every pixel of the box is a pixel of the result: nothing has to be interpolated.
  bool is_copy() const {
    return box.width == static_cast<double>(width) && box.height == static_cast<double>(height) &&
           box.left == std::floor(box.left) && box.top == std::floor(box.top);
  }
};

// Byte value v of channel c becomes v * scale[c] + shift[c].
struct Normalisation {
  static constexpr int64_t kMaxChannels = 4;
  float scale[kMaxChannels] = {1, 1, 1, 1};
  float shift[kMaxChannels] = {};
};

// Bilinear with antialiasing, as in torchvision and Pillow: a triangle filter whose half width is a result pixel,
// measured in source pixels, and at least one source pixel. The box is clipped to the image. Where placement.is_copy() it copies
// pixels; those outside of the image have byte value 0.
void resize_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into);

struct ColourChange {
  float brightness = 1;  // factors; 1 changes nothing
  float contrast = 1;
  float saturation = 1;
  float hue = 0;  // of a whole turn
};

// pixels: (C, H, W) in [0, 1]; stays in [0, 1]. Brightness, contrast, saturation, hue, in this order; the last two need
// three channels. Each is computed as in torchvision's adjust_*.
void change_colours(float* pixels, const ImageShape& shape, const ColourChange& change);

// values = values * scale + shift, channel by channel
void normalise(float* values, const ImageShape& shape, const Normalisation& normalisation);

// into = share * into + (1 - share) * other
void mix_into(float* into, const float* other, float share, int64_t count);

}  // namespace lockstep
