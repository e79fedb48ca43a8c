// data/images/image_kernels.h: from stored bytes to a sample's floats (C, H, W), in one pass over each pixel.
//
// Threads: no state but scratch memory of the calling thread
#pragma once

#include "lockstep/images.h"

namespace lockstep {

// Requires placement.is_copy(). What lies outside of the image has byte value 0.
void copy_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into);

// Bilinear with antialiasing: a triangle filter as wide as a result's pixel in the source, at least as a source's
// pixel; torchvision's and Pillow's. The box is clipped to the image.
void resize_image(const ImageView& image, const Placement& placement, const Normalisation& normalisation, float* into);

struct ColourChange {
  float brightness = 1;  // factors; 1 changes nothing
  float contrast = 1;
  float saturation = 1;
  float hue = 0;  // of a whole turn
};

// pixels: (C, H, W) in [0, 1]; stays in [0, 1]. Brightness, contrast, saturation, hue, in this order; the last two need
// three channels. What each does is what torchvision's adjust_* do.
void change_colours(float* pixels, const ImageShape& shape, const ColourChange& change);

// values = values * scale + shift, channel by channel
void normalise(float* values, const ImageShape& shape, const Normalisation& normalisation);

// into = share * into + (1 - share) * other
void mix_into(float* into, const float* other, float share, std::int64_t count);

}  // namespace lockstep
