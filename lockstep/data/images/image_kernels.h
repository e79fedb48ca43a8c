// SPDX-License-Identifier: Apache-2.0
// data/images/image_kernels.h: from stored bytes to a sample's floats (C, H, W), in one pass over each pixel.
//
// Threads: no state but scratch memory of the calling thread
#pragma once

#include "lockstep/data/images/image_view.h"

namespace lockstep {

// Requires placement.is_copy(). Pixels outside of the image have byte value 0.
void copy_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into);

// Bilinear with antialiasing, as in torchvision and Pillow: a triangle filter whose half width is a result pixel,
// measured in source pixels, and at least one source pixel. The box is clipped to the image.
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
void mix_into(float* into, const float* other, float share, std::int64_t count);

}  // namespace lockstep
